"""Sums, means, maxima, norms: over other dims local, over the sequence one of this rank's tokens and one over the ranks.

    sum  = sum over ranks of sum_s x           max = largest over ranks of max_s x, its gradient in equal parts to the tokens that have it

What is over the sequence is whole on every rank, with the gradient that one device gives.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_sp import comm
from lightning_sp.global_view.calls.call import NO_RULE, Call, Rule, dims_of, is_sequence, named, placed
from lightning_sp.global_view.exchange.movement import as_tokens
from lightning_sp.global_view.exchange.order_statistics import of_all
from lightning_sp.global_view.rules.indexing.taking import summed
from lightning_sp.global_view.rules.pointwise import pointwise
from lightning_sp.global_view.rules.shapes import MOST_IN_A_ROW
from lightning_sp.global_view.tensors.sequence_tensor import SequenceTensor

# x, its dims, whether they stay -> the result, whole
Reduce = Callable[[SequenceTensor, list[int], bool, Call], Any]


def reduction(over_sequence: Reduce, first_dim: int = 1) -> Rule:
    """Return the rule of a reduction.

    Args:
        over_sequence: what it is where the sequence is one of its dims.
        first_dim: the place of `dim` among the arguments.
    """

    def rule(call: Call) -> Any:
        x = call.args[0]
        if len(call.args) > 1 and isinstance(call.args[1], Tensor):
            return pointwise(call)  # the larger of two
        dims = dims_of(call.argument(first_dim, "dim", call.kwargs.get("axis")), x.dim())
        keeps = bool(call.argument(first_dim + 1, "keepdim", False))
        if call.name in ("var", "std"):  # (dim, unbiased, keepdim), or (unbiased)
            keeps = bool(call.argument(3, "keepdim", False))
            dims = dims_of(None, x.dim()) if isinstance(call.argument(1, "dim"), bool) else dims
        own = x.placement
        if own.dim not in dims:
            return placed(call.on_locals(), own if keeps else own.at(own.dim - sum(dim < own.dim for dim in dims)))
        own.storage.note_reduction()
        return over_sequence(x, dims, keeps, call)

    return rule


def _count(x: SequenceTensor, dims: list[int]) -> int:
    return math.prod(x.shape[dim] for dim in dims)


def _lowest(dtype: torch.dtype) -> float | int:
    return -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min if dtype != torch.bool else 0


def total(x: SequenceTensor, dims: list[int], keeps: bool, call: Call | None = None) -> Tensor:
    """Return the sum."""
    dtype = call.kwargs.get("dtype") if call is not None else None
    return summed(x.placement.without_padding(x.local, 0).sum(dims, keepdim=keeps, dtype=dtype), x)


def mean(x: SequenceTensor, dims: list[int], keeps: bool, call: Call | None = None) -> Tensor:
    """Return the mean."""
    return total(x, dims, keeps, call) / _count(x, dims)


def largest_of(x: SequenceTensor, dims: list[int]) -> Tensor:
    """Return the largest, with its dims, without a gradient."""
    hidden = x.placement.without_padding(x.local.detach(), _lowest(x.dtype))
    most = hidden.amax(dims, keepdim=True)
    is_bool = most.dtype == torch.bool
    most = comm.largest(most.to(torch.uint8) if is_bool else most, x.placement.storage.group)
    return most.bool() if is_bool else most


def amax(x: SequenceTensor, dims: list[int], keeps: bool, call: Call) -> Tensor:
    """Return the largest; its gradient goes to those that are as large, in equal parts."""
    highest = largest_of(x, dims)
    result = highest if keeps else _without(highest, dims)
    if not x.local.requires_grad:
        return result
    ties = x.placement.without_padding(x.local.detach() == highest, False)
    share = torch.where(ties, x.local - x.local.detach(), torch.zeros_like(x.local)).nan_to_num(0.0)
    number = summed(ties.to(x.dtype).sum(dims, keepdim=keeps), x)
    return result + summed(share.sum(dims, keepdim=keeps), x) / number


def _without(x: Tensor, dims: list[int]) -> Tensor:
    return x.squeeze(tuple(dims))


def extreme(x: SequenceTensor, dims: list[int], keeps: bool, call: Call) -> Any:
    """Return the largest or the smallest, over all, or along one dim with the first position that has it."""
    if call.name == "min" or call.name == "amin" or call.name == "argmin":
        if x.dtype == torch.bool or (not x.is_floating_point() and x.dtype == torch.uint8):
            return NO_RULE
        opposite = SequenceTensor(-x.local, x.placement)
        largest = "amax" if call.name == "amin" else "max"
        found = extreme(
            opposite, dims, keeps, Call(name=largest, function=torch.max, args=call.args, kwargs=call.kwargs)
        )
        if found is NO_RULE:
            return NO_RULE
        return torch.return_types.min((-found[0], found[1])) if isinstance(found, tuple) else -found
    own = x.placement
    if call.name in ("amax", "amin") or len(dims) != 1 or (len(call.args) < 2 and "dim" not in call.kwargs):
        return amax(x, dims, keeps, call)
    if own.outer * own.inner > 1:
        return NO_RULE
    highest = largest_of(x, dims)
    ties = own.without_padding(x.local.detach() == highest, False)
    positions = own.storage.positions(x.device).view([-1 if i == own.dim else 1 for i in range(x.dim())])
    first = torch.where(ties, positions, own.storage.capacity).amin(own.dim, keepdim=True)
    first = -comm.largest(-first, own.storage.group)
    values = summed(torch.where(positions == first, x.local, torch.zeros_like(x.local)).sum(own.dim, keepdim=True), x)
    values, first = (each if keeps else each.squeeze(own.dim) for each in (values.to(x.dtype), first))
    return torch.return_types.max((values, first))


def arg_extreme(x: SequenceTensor, dims: list[int], keeps: bool, call: Call) -> Any:
    """Return the first position of the largest or the smallest along one dim."""
    name = call.name.removeprefix("arg")
    if call.argument(1, "dim") is None:  # the place among all numbers
        flat: Any = x.flatten()
        if not is_sequence(flat) or flat.shape[0] > MOST_IN_A_ROW or keeps:
            return NO_RULE
        x, dims = as_tokens(flat), [0]
    found = extreme(x, dims, keeps, Call(name=name, function=call.function, args=(x, dims[0]), kwargs={}))
    return found if found is NO_RULE else found[1]


def logsumexp(x: SequenceTensor, dims: list[int], keeps: bool, call: Call) -> Tensor:
    """Return the logarithm of the sum of exponentials."""
    highest = largest_of(x, dims)
    highest = torch.where(highest.isfinite(), highest, torch.zeros_like(highest))
    sums = total(SequenceTensor((x.local - highest).exp(), x.placement), dims, True)
    result = sums.log() + highest
    return result if keeps else _without(result, dims)


def norm(x: SequenceTensor, dims: list[int], keeps: bool, call: Call) -> Any:
    """Return a vector norm: that of the ranks' norms."""
    power = call.argument(1, "p", call.kwargs.get("ord", 2))
    power = 2 if power in (None, "fro") else power
    is_matrix = (
        call.function.__name__ == "linalg_norm" and len(dims) == 2 and call.argument(1, "ord") not in (None, "fro")
    )
    if not isinstance(power, (int, float)) or power <= 0 or is_matrix:
        return NO_RULE
    local = x.placement.without_padding(x.local, 0)
    own = torch.linalg.vector_norm(local, power, dims, keepdim=keeps, dtype=call.kwargs.get("dtype"))
    norms = torch.stack(comm.gather_over_ranks(own, x.placement.storage.group))
    return torch.linalg.vector_norm(norms, power, 0)


def variance(x: SequenceTensor, dims: list[int], keeps: bool, call: Call) -> Tensor:
    """Return the variance or the standard deviation, of the sample unless said otherwise."""
    unbiased = call.kwargs.get("unbiased", True)
    for each in call.args[1:3]:
        unbiased = each if isinstance(each, bool) else unbiased
    correction = call.kwargs.get("correction", int(unbiased))
    squares = (x.local - mean(x, dims, True)).square()
    result: Tensor = total(SequenceTensor(squares, x.placement), dims, keeps) / (_count(x, dims) - correction)
    if call.name != "std":
        return result
    nothing = result == 0  # where torch's gradient is 0, and a root's is not finite
    return result.masked_fill(nothing, 1).sqrt().masked_fill(nothing, 0)


def any_all(x: SequenceTensor, dims: list[int], keeps: bool, call: Call) -> Tensor:
    """Return whether any is true, or all are."""
    wanted = x.local.bool() if call.name == "any" else ~x.local.bool()
    found = total(SequenceTensor(wanted, x.placement), dims, keeps) > 0
    return found if call.name == "any" else ~found


def count_nonzero(x: SequenceTensor, dims: list[int], keeps: bool, call: Call) -> Tensor:
    """Return how many are not 0."""
    return total(SequenceTensor(x.local != 0, x.placement), dims, False)


def prod(x: SequenceTensor, dims: list[int], keeps: bool, call: Call) -> Tensor:
    """Return the product."""
    local = x.placement.without_padding(x.local, 1)
    for dim in sorted(dims, reverse=True):
        local = local.prod(dim, keepdim=keeps, dtype=call.kwargs.get("dtype"))
    return torch.stack(comm.gather_over_ranks(local, x.placement.storage.group)).prod(0)


def both(call: Call) -> Any:
    """Return the variance or the standard deviation, and the mean."""
    x, rest, kwargs = call.args[0], call.args[1:], dict(call.kwargs)
    dim = kwargs.get("dim", None if not rest or isinstance(rest[0], bool) else rest[0])
    keeps = kwargs.get("keepdim", rest[2] if len(rest) > 2 else False)
    first = getattr(torch, call.name.removesuffix("_mean"))(x, *rest, **kwargs)
    return first, torch.mean(x) if dim is None else torch.mean(x, dim, keepdim=keeps)


def without_nan(call: Call) -> Any:
    """Add up what is a number, or take the mean of these."""
    x = call.args[0]
    if not is_sequence(x):
        return NO_RULE
    there = ~torch.isnan(x)
    summed = torch.sum(torch.where(there, x, torch.zeros((), dtype=x.dtype)), *call.args[1:], **call.kwargs)
    if call.name == "nansum":
        return summed
    others = {name: value for name, value in call.kwargs.items() if name != "dtype"}
    return summed / torch.sum(there, *call.args[1:], **others)


def both_extremes(call: Call) -> Any:
    """Return the smallest and the largest."""
    x, dim, keeps = call.args[0], call.kwargs.get("dim"), call.kwargs.get("keepdim", False)
    given = () if dim is None else (dim, keeps)
    return torch.return_types.aminmax((torch.amin(x, *given), torch.amax(x, *given)))


def softmax(call: Call) -> Any:
    """Weigh the tokens of a sequence by each other (attention pooling)."""
    x, dim = call.args[0], call.argument(1, "dim", -1)
    own = x.placement
    if not isinstance(dim, int) or dim % x.dim() != own.dim:
        return NO_RULE
    dtype = call.kwargs.get("dtype")
    x = x if dtype is None else SequenceTensor(x.local.to(dtype), own)
    own.storage.note_reduction()
    normalizer = logsumexp(x, [own.dim], True, call)
    result = x.local - normalizer
    return SequenceTensor(result if call.name == "log_softmax" else result.exp(), own)


def normalize(call: Call) -> Any:
    """Scale what lies along the sequence to length 1."""
    x = call.argument(0, "input")
    power, dim, least = (
        call.argument(i, name, default) for i, name, default in ((1, "p", 2.0), (2, "dim", 1), (3, "eps", 1e-12))
    )
    if (
        not is_sequence(x)
        or not isinstance(dim, int)
        or dim % x.dim() != x.placement.dim
        or call.kwargs.get("out") is not None
    ):
        return NO_RULE
    return x / torch.linalg.vector_norm(x, power, dim, keepdim=True).clamp_min(least)


def similarity(call: Call) -> Any:
    """Compare what lies along the sequence by its angle, or along another dim where one token stands for all."""
    a, b = call.argument(0, "x1"), call.argument(1, "x2")
    dim, least = call.argument(2, "dim", 1), call.argument(3, "eps", 1e-8)
    if a.dim() != b.dim() or a.shape[dim] != b.shape[dim]:
        return NO_RULE
    lengths = [torch.linalg.vector_norm(each, 2, dim).clamp_min(least) for each in (a, b)]
    return (a * b).sum(dim) / (lengths[0] * lengths[1])


def distance(call: Call) -> Any:
    """Return the norm of a difference."""
    return torch.linalg.vector_norm(call.args[0] - call.args[1], call.argument(2, "p", 2))


def inner_product(call: Call) -> Any:
    """Add up the products of two vectors' numbers."""
    a, b = call.args
    return (a.conj() * b if call.name == "vdot" else a * b).sum()


def median_of_all(call: Call) -> Any:
    """Return the middle of all numbers; its gradient goes to those that are equal to it, in equal parts."""
    x = call.args[0]
    if len(call.args) > 1 or call.kwargs or not is_sequence(x) or not x.is_floating_point():
        return NO_RULE
    x.placement.storage.note_reduction()
    count = x.numel() if call.name == "median" else int((~torch.isnan(x.detach())).sum())
    found = of_all(x, [max(0, count - 1) // 2])[0]
    if call.name == "median" and bool(torch.isnan(x.detach()).any()):
        found = torch.full_like(found, math.nan)
    return _with_gradient(x, found)


def quantile_of_all(call: Call) -> Any:
    """Return what so large a part of all numbers lies below, between two of them by a line."""
    x, q, dim = call.argument(0, "input"), call.argument(1, "q"), call.argument(2, "dim")
    how = call.kwargs.get("interpolation", "linear")
    if not is_sequence(x) or dim is not None or call.argument(3, "keepdim", False) or how != "linear" or is_sequence(q):
        return NO_RULE
    places = torch.as_tensor(q, dtype=x.dtype, device=x.device)
    if places.dim() > 1 or call.name == "nanquantile" or bool(torch.isnan(x.detach()).any()):
        return NO_RULE
    x.placement.storage.note_reduction()
    ranks = places.flatten() * (x.numel() - 1)
    low = ranks.floor()
    several = [int(each) for each in (*low, *ranks.ceil())]
    found = torch.stack([_with_gradient(x, each) for each in of_all(x, several)]).view(2, -1)
    return torch.lerp(found[0], found[1], ranks - low).reshape(places.shape)


def _with_gradient(x: SequenceTensor, value: Tensor) -> Tensor:
    """Return one number of all with its gradient, in equal parts to those that are equal to it."""
    if not x.local.requires_grad:
        return value
    ties = x.placement.without_padding((x.local.detach() == value) | (x.local.detach().isnan() & value.isnan()), False)
    share = torch.where(ties, x.local - x.local.detach(), torch.zeros_like(x.local)).nan_to_num(0.0)
    number = summed(ties.to(x.dtype).sum(), x)
    return value + summed(share.sum(), x) / number.clamp(min=1)


RULES: dict[str, Rule] = {
    **named("normalize", normalize),
    **named("cosine_similarity", similarity),
    **named("dist", distance),
    **named("dot vdot", inner_product),
    **named("median nanmedian", median_of_all),
    **named("quantile nanquantile", quantile_of_all),
    **named("sum", reduction(total)),
    **named("mean", reduction(mean)),
    **named("amax", reduction(amax)),
    **named("amin max min", reduction(extreme)),
    **named("argmax argmin", reduction(arg_extreme)),
    **named("logsumexp", reduction(logsumexp)),
    **named("norm vector_norm", reduction(norm, first_dim=2)),
    **named("var std", reduction(variance)),
    **named("any all", reduction(any_all)),
    **named("count_nonzero", reduction(count_nonzero)),
    **named("prod", reduction(prod)),
    **named("std_mean var_mean", both),
    **named("nansum nanmean", without_nan),
    **named("aminmax", both_extremes),
}
