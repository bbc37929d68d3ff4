"""Tensors that show a whole sequence and hold this rank's part of it; one table of rules says how each function of torch treats that."""
