"""Branches that a first step cannot compare: behind weights that begin at zero both runs have a gradient of 0, whatever the branch computes.

    y = x + W_out f(x),  W_out = 0,  W_head = 0     =>     dL/dW_out = 0 and dL/df = 0, whole and sharded

GPT-2 derivatives, adaLN-Zero, gates and LoRA's B begin so. Such weights are given small numbers for a second comparison, and are zero again
afterwards.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_sp import comm
from lightning_sp.preflight.comparison import plain_name

# Of a vector, a gate; of a matrix it is 1 / sqrt(columns).
_STANDARD_DEVIATION = 0.5


def zero_weights(module: nn.Module, gradients: Mapping[str, Tensor | None]) -> dict[str, nn.Parameter]:
    """Return the trained weights that are zero, if any other has a gradient of zero; biases hide nothing. Equal on all ranks.

    Args:
        module: the sharded module.
        gradients: of a whole run, this rank's shards.

    Communicates: one all_reduce of two numbers for each parameter.
    """
    trained = {plain_name(n): p for n, p in module.named_parameters() if p.requires_grad and p.is_floating_point()}
    if not trained:
        return {}
    counts = torch.stack([torch.stack([_nonzero(p), _nonzero(gradients.get(n))]) for n, p in trained.items()])
    nonzero = comm.reduce_sum(counts.to(next(iter(trained.values())).device)).tolist()
    zero = [name for name, (values, _) in zip(trained, nonzero, strict=True) if not values]
    hidden = any(values and not gradient for values, gradient in nonzero)
    return {name: trained[name] for name in zero if hidden and name.rpartition(".")[2] != "bias"}


@contextmanager
def with_small_numbers(weights: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """Give zero weights small numbers, alike on replicas, and let them be zero again afterwards."""
    with torch.no_grad():
        for name, weight in weights.items():
            local = _local(weight)
            scale = _STANDARD_DEVIATION if weight.dim() < 2 else weight.shape[-1] ** -0.5
            generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {_shard_of(weight)}".encode()))
            local.copy_(torch.randn(local.shape, generator=generator) * scale)
    try:
        yield
    finally:
        for weight in weights.values():
            _local(weight).zero_()


def _nonzero(tensor: Tensor | None) -> Tensor:
    if tensor is None:
        return torch.zeros((), dtype=torch.float64)
    return torch.count_nonzero(_local(tensor)).to("cpu", torch.float64)


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's part, in the memory of the whole."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _shard_of(weight: nn.Parameter) -> list[int]:
    """Return which part of a weight this rank has: its coordinates in the mesh, along the dims that split it."""
    if not isinstance(weight, DTensor):
        return []
    return [weight.device_mesh.get_local_rank(dim) for dim, each in enumerate(weight.placements) if each.is_shard()]
