"""The attention alone, in a torchrun script without Lightning: each rank gives its part of q, k and v.

    torchrun --nproc-per-node 4 examples/attention_only.py --ring-size 2 --ulysses-size 2

It prints how far outputs and gradients are from those of one process over the whole sequence.
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F

from lightning_sp import AttentionMask, SequenceMesh, build_device_mesh, sequence_parallel_attention, shard, unshard


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ring-size", type=int, default=1)
    parser.add_argument("--ulysses-size", type=int, default=None)
    parser.add_argument("--sequence-length", type=int, default=1024)
    options = parser.parse_args()

    dist.init_process_group("gloo")
    world_size = dist.get_world_size()
    base = build_device_mesh("cpu", data_parallel_size=1, sequence_parallel_size=world_size)
    ulysses_size = options.ulysses_size or world_size // options.ring_size
    mesh = SequenceMesh.build(base, ring_size=options.ring_size, ulysses_size=ulysses_size)
    length = mesh.layout.padded_length(options.sequence_length)

    # The same whole tensors on every rank, here only to compare with: 8 query heads, 2 key-value heads.
    torch.manual_seed(0)
    whole = [torch.randn(1, heads, length, 16, dtype=torch.float64) for heads in (8, 2, 2)]
    weights = torch.randn(1, 8, length, 16, dtype=torch.float64)

    def part(tensor: torch.Tensor) -> torch.Tensor:
        return shard(tensor, mesh.layout, mesh.sequence_rank, dim=2)

    q, k, v = (part(tensor).requires_grad_() for tensor in whole)
    out = sequence_parallel_attention(q, k, v, mesh=mesh, mask=AttentionMask(causal=True))
    (out * part(weights)).sum().backward()

    for tensor in whole:
        tensor.requires_grad_()
    expected = F.scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=True)
    (expected * weights).sum().backward()
    pairs = {
        "out": (out, expected),
        "dq": (q.grad, whole[0].grad),
        "dk": (k.grad, whole[1].grad),
        "dv": (v.grad, whole[2].grad),
    }
    errors = {
        name: float((unshard(mine.detach(), mesh.layout, mesh.sequence_group, dim=2) - theirs.detach()).abs().max())
        for name, (mine, theirs) in pairs.items()
    }
    if dist.get_rank() == 0:
        described = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
        print(f"{mesh.describe()}, {length} tokens, float64: largest differences from one process: {described}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
