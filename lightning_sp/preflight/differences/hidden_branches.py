"""Branches that a first step cannot compare: behind weights that begin at zero both runs have a gradient of 0, whatever the branch computes.

    y = x + W_out f(x),  W_out = 0,  W_head = 0     =>     dL/dW_out = 0 and dL/df = 0, whole and sharded

GPT-2 derivatives, adaLN-Zero, gates and LoRA's B begin so. A gate's own gradient shows what the branch gives, but no slope of it. Such weights
are given small numbers for a second comparison, and are zero again afterwards.

    KL(student || teacher),  teacher = student          =>     0, and a gradient of 0, whole and sharded

So are copies of trained weights, an average of them say, that nothing has moved apart yet.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_sp import comm
from lightning_sp.preflight.comparison import plain_name

# Of a vector, a gate; of a matrix it is 1 / sqrt(columns).
_STANDARD_DEVIATION = 0.5


class HidingWeights(NamedTuple):
    """Weights that hide what is made of them, by name.

    Args:
        zeros: that are zero, or have a zero.
        copies: that equal trained ones, and have no gradient.
    """

    zeros: dict[str, nn.Parameter]
    copies: dict[str, nn.Parameter]

    def __bool__(self) -> bool:
        """Return whether there are any."""
        return bool(self.zeros or self.copies)

    def describe(self) -> str:
        """Return them in words."""
        which = {"begin at zero": self.zeros, "are copies of trained ones": self.copies}
        return ", and in ".join(f"{first_names([*found])}, which {why}" for why, found in which.items() if found)


def first_names(names: Sequence[str]) -> str:
    """Return names, two of them and how many more there are."""
    return ", ".join([*names[:2], *([f"{len(names) - 2} more"] if len(names) > 2 else [])])


def hiding_weights(module: nn.Module, gradients: Mapping[str, Tensor | None]) -> HidingWeights:
    """Return the weights that hide what is made of them. Equal on all ranks. As `zero_weights` and `copied_weights`."""
    zeros = zero_weights(module, gradients)
    copies = copied_weights(module, gradients)
    return HidingWeights(zeros, {name: weight for name, weight in copies.items() if name not in zeros})


def copied_weights(module: nn.Module, gradients: Mapping[str, Tensor | None]) -> dict[str, nn.Parameter]:
    """Return the weights without a gradient that equal trained ones of the same shape; none of one number throughout. Equal on all ranks.

    Args:
        module: the sharded module.
        gradients: of a whole run, this rank's shards.

    Communicates: one all_reduce of two numbers for each parameter, where some have a gradient and others of their shape none.
    """
    weights = {plain_name(n): p for n, p in module.named_parameters() if _holds_numbers(p) and p.dim()}
    trained = {name for name in weights if gradients.get(name) is not None}
    shapes = {weights[name].shape for name in trained}
    others = [name for name in weights if name not in trained and weights[name].shape in shapes]
    if not others or not trained:
        return {}
    numbers = {name: _digest(weights[name]) for name in weights if weights[name].shape in shapes}
    known = {(weights[name].shape, numbers[name]) for name in trained}
    device = weights[others[0]].device
    own = torch.tensor(
        [[(weights[name].shape, numbers[name]) in known, numbers[name][1] > numbers[name][2]] for name in others],
        dtype=torch.float64,
        device=device,
    )
    # A rank may have no row of a weight. One number throughout: a norm's ones are no copy.
    same, varies = comm.reduce_sum(own).T.tolist()
    size = comm.size_of(comm.world())
    return {name: weights[name] for name, a, b in zip(others, same, varies, strict=True) if a == size and b}


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
def with_small_numbers(weights: HidingWeights) -> Iterator[None]:
    """Give the zeros of weights small numbers, and add some to copies, alike on replicas; they are as before afterwards."""
    zeros = {name: _local(weight) == 0 for name, weight in weights.zeros.items()}
    before = {name: _local(weight).clone() for name, weight in weights.copies.items()}
    with torch.no_grad():
        for name, weight in weights.zeros.items():
            local = _local(weight)
            local.copy_(torch.where(zeros[name], _drawn(name, weight), local))
        for name, weight in weights.copies.items():
            _local(weight).add_(_drawn(name, weight))
    try:
        yield
    finally:
        for name, weight in weights.zeros.items():
            _local(weight).masked_fill_(zeros[name], 0.0)
        for name, weight in weights.copies.items():
            _local(weight).copy_(before[name])


def _drawn(name: str, weight: nn.Parameter) -> Tensor:
    """Return small numbers for this rank's part of a weight."""
    local = _local(weight)
    scale = _STANDARD_DEVIATION if weight.dim() < 2 else weight.shape[-1] ** -0.5
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {_shard_of(weight)}".encode()))
    return (torch.randn(local.shape, generator=generator) * scale).to(local)


def _digest(weight: nn.Parameter) -> tuple[float, float, float]:
    """Return numbers of this rank's part that differ, almost surely, where weights do: a sum, the largest, the smallest."""
    local = _local(weight).double().flatten()
    if not local.numel():
        return 0.0, 0.0, 0.0
    places = torch.arange(len(local), device=local.device, dtype=torch.float64)
    return float(local @ torch.cos(places * 1.7 + 0.3)), float(local.max()), float(local.min())


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
