"""Branches that a first step cannot compare: behind weights that begin at zero both runs have a gradient of 0, whatever the branch computes.

    y = x + W_out f(x),  W_out = 0,  W_head = 0     =>     dL/dW_out = 0 and dL/df = 0, whole and sharded

GPT-2 derivatives, adaLN-Zero, gates and LoRA's B begin so. A gate's own gradient shows what the branch gives, but no slope of it. Such weights
are given small numbers for a second comparison, and are zero again afterwards.
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
    """Return the weights that are zero, and vectors that have a zero, frozen ones too; biases hide nothing. Equal on all ranks.

    Where a gradient is zero, matrices that have a zero as well.

    Args:
        module: the sharded module.
        gradients: of a whole run, this rank's shards.

    Communicates: one all_reduce of four numbers for each parameter.
    """
    weights = {plain_name(n): p for n, p in module.named_parameters() if _holds_numbers(p)}
    if not weights:
        return {}
    counts = torch.stack([_counts(p, gradients.get(n)) for n, p in weights.items()])
    numbers = comm.reduce_sum(counts.to(next(iter(weights.values())).device)).tolist()
    # A gate among other numbers: a vector of gates, the rows of one projection that makes shift, scale and gate.
    hides_more = any(values and used and not gradient for values, _, used, gradient in numbers)
    found = {}
    for (name, weight), (values, zeros, *_) in zip(weights.items(), numbers, strict=True):
        hides = zeros and (not values or hides_more or weight.dim() < 2)
        if hides and name.rpartition(".")[2] != "bias":
            found[name] = weight
    return found


@contextmanager
def with_small_numbers(weights: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """Give the zeros of weights small numbers, alike on replicas, and let them be zero again afterwards."""
    zeros = {name: _local(weight) == 0 for name, weight in weights.items()}
    with torch.no_grad():
        for name, weight in weights.items():
            local = _local(weight)
            scale = _STANDARD_DEVIATION if weight.dim() < 2 else weight.shape[-1] ** -0.5
            generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {_shard_of(weight)}".encode()))
            drawn = torch.randn(local.shape, generator=generator) * scale
            local.copy_(torch.where(zeros[name], drawn.to(local), local))
    try:
        yield
    finally:
        for name, weight in weights.items():
            _local(weight).masked_fill_(zeros[name], 0.0)


def _counts(weight: Tensor, gradient: Tensor | None) -> Tensor:
    """Return how many numbers of a weight are not zero, and how many are; whether it has a gradient, and how many of that are not zero."""
    local = _local(weight)
    values = int(torch.count_nonzero(local))
    of_gradient = 0 if gradient is None else int(torch.count_nonzero(gradient))
    return torch.tensor([values, local.numel() - values, gradient is not None, of_gradient], dtype=torch.float64)


def _holds_numbers(weight: Tensor) -> bool:
    """Return whether a weight is trained, or is frozen and no codes of few bits."""
    is_plain = type(_local(weight)) is Tensor and weight.dtype.itemsize > 1
    return weight.is_floating_point() and (weight.requires_grad or is_plain)


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's part, in the memory of the whole."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _shard_of(weight: nn.Parameter) -> list[int]:
    """Return which part of a weight this rank has: its coordinates in the mesh, along the dims that split it."""
    if not isinstance(weight, DTensor):
        return []
    return [weight.device_mesh.get_local_rank(dim) for dim, each in enumerate(weight.placements) if each.is_shard()]
