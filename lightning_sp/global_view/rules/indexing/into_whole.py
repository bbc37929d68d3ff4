"""Tokens that are added up in a whole tensor: counts, sums by class, bags of words. Each rank adds its own, then the ranks add theirs up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_sp.global_view.calls.call import NO_RULE, Call, Rule, is_plain, is_sequence, named, writes
from lightning_sp.global_view.exchange.movement import brought
from lightning_sp.global_view.rules.indexing.taking import summed
from lightning_sp.global_view.tensors.placement import part_of
from lightning_sp.global_view.tensors.sequence_tensor import SequenceTensor


def _aligned(index: Any, source: Any) -> tuple[SequenceTensor, SequenceTensor] | None:
    """Return an index and what is added, both split alike; None where their sequences are not the same."""
    like = source if is_sequence(source) else index
    if not is_sequence(like):
        return None
    found = []
    for each in (index, source):
        at = like.placement.at(like.placement.dim - (like.dim() - each.dim()))
        if is_plain(each) and at.dim >= 0 and each.shape[at.dim] == at.shown:
            each = SequenceTensor(part_of(each, at), at)
        if not is_sequence(each):
            return None
        each = brought(each, like.placement.storage)
        if each.placement.dim != at.dim or not each.placement.same_tokens(at):
            return None
        found.append(each)
    return found[0], found[1]


def _into(call: Call, added: Tensor, like: SequenceTensor) -> Any:
    """Add what every rank adds to a whole tensor, in place where the function does."""
    like.placement.storage.note_reduction()
    into, total = call.args[0], summed(added, like)
    return into.add_(total) if writes(call.function) else into + total


def scatter_add(call: Call) -> Any:
    """Add numbers to the places that an index says, of a whole tensor."""
    into, dim, index, source = (call.argument(i, name) for i, name in enumerate(("input", "dim", "index", "src")))
    if not is_plain(into) or not isinstance(source, Tensor) or index.dim() != into.dim():
        return NO_RULE
    found = _aligned(index, source)
    if found is None:
        return NO_RULE
    index, source = found
    own = index.placement
    # Numbers of the sequence's dim say the place there, where it is not the dim that is scattered along.
    if own.dim != dim % into.dim():
        return NO_RULE
    # Padding adds 0 to the first place.
    at, numbers = own.without_padding(index.local, 0), own.without_padding(source.local.to(into.dtype), 0)
    added = torch.zeros_like(into).scatter_add(dim, at, numbers)
    return _into(call, added, index)


def index_add(call: Call) -> Any:
    """Add tokens to the rows that their ids say, of a whole tensor."""
    into, dim, index, source = (call.argument(i, name) for i, name in enumerate(("input", "dim", "index", "source")))
    if not is_plain(into):
        return NO_RULE
    dim %= into.dim()
    if not is_sequence(source) or source.placement.dim != dim:
        return NO_RULE
    lead = replace(source.placement, dim=0)
    if is_plain(index):
        index = SequenceTensor(part_of(index, lead), lead)
    index = brought(index, source.placement.storage)
    if not index.placement.same_tokens(source.placement):
        return NO_RULE
    values = source.placement.without_padding(source.local.to(into.dtype), 0) * call.kwargs.get("alpha", 1)
    return _into(
        call, torch.zeros_like(into).index_add(dim, index.placement.without_padding(index.local, 0), values), source
    )


def index_copy(call: Call) -> Any:
    """Put tokens in the places of a whole tensor that a whole index says, a cache of keys: they are made whole for it, as it is."""
    if not is_plain(call.args[0]):
        return NO_RULE
    call.tensors[0].placement.storage.note_reduction()
    return call.on_wholes()


def index_put(call: Call) -> Any:
    """Add numbers to the places that ids of tokens say, in the first dims of a whole tensor."""
    into, index, values = call.args[:3]
    if not is_plain(into) or not call.argument(3, "accumulate", False) or not isinstance(values, Tensor):
        return NO_RULE
    if any(not isinstance(each, Tensor) or each.is_floating_point() or each.dtype == torch.bool for each in index):
        return NO_RULE
    count = len(index)
    place: Any = torch.zeros((), dtype=torch.int64, device=into.device)
    for size, each in zip(into.shape[:count], index, strict=True):
        place = place * size + each % size
    wide = values.expand(*place.shape, *into.shape[count:])
    if not is_sequence(place) or place.dim() < 1:
        return NO_RULE
    joined = into.reshape(-1, *into.shape[count:])
    added = torch.zeros_like(joined).index_add(0, place.flatten(), wide.flatten(0, place.dim() - 1)).view(into.shape)
    return into.add_(added) if writes(call.function) else into + added


def histogram(call: Call) -> Any:
    """Count how many numbers lie in each of some ranges."""
    x, bins = call.argument(0, "input"), call.argument(1, "bins", 100)
    if not is_sequence(x) or len(call.tensors) > 1:
        return NO_RULE
    own = x.placement
    real = own.real(x.local)
    numbers = x.local.detach().flatten() if real is None else x.local.detach()[real.expand(x.local.shape)]
    own.storage.note_reduction()
    if call.name == "histc":
        low, high = call.argument(2, "min", 0), call.argument(3, "max", 0)
        low, high = _ends(x, 1.0) if low == high == 0 else (low, high)
        return summed(torch.histc(numbers, bins, low, high), x)
    if call.kwargs.get("weight") is not None:
        return NO_RULE
    if not isinstance(bins, Tensor):
        given = call.kwargs.get("range")
        count, edges = torch.histogram(numbers, bins, range=_ends(x, 0.5) if given is None else given)
    else:
        count, edges = torch.histogram(numbers, bins)
    count = summed(count, x)
    if call.kwargs.get("density", False):
        count = count / count.sum() / edges.diff()
    return torch.return_types.histogram((count, edges))


def bincount(call: Call) -> Any:
    """Count how often each whole number is there, or add up the weights of each."""
    x, weights, fewest = call.argument(0, "input"), call.argument(1, "weights"), call.argument(2, "minlength", 0)
    aligned = _aligned(x, x if weights is None else weights) if is_sequence(x) else None
    if aligned is None:
        return NO_RULE
    own, size = x.placement, max(int(fewest), int(x.max()) + 1)
    own.storage.note_reduction()
    real = own.real(x.local)
    numbers, weight = (each.local if real is None else each.local[real] for each in aligned)
    return summed(torch.bincount(numbers, None if weights is None else weight, size), x)


def _ends(x: SequenceTensor, beside: float) -> tuple[float, float]:
    """Return the smallest and the largest number, with some room where they are the same."""
    low, high = float(x.detach().min()), float(x.detach().max())
    return (low - beside, high + beside) if low == high else (low, high)


RULES: dict[str, Rule] = {
    **named("index_put", index_put),
    **named("scatter_add", scatter_add),
    **named("index_add", index_add),
    **named("index_copy", index_copy),
    **named("histc histogram", histogram),
    "bincount": bincount,
}
