"""Functions that are not torch's own, given tensors of the sequence: of autograd, of torch.jit, collectives."""
