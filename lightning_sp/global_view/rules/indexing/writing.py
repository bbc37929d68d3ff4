"""Writing into a tensor of the sequence: what an index or a mask says, and rows into the places of tokens that a mask chooses.

Each rank writes into its own tokens. What is written is brought to them: a number, a whole tensor, or tokens of other places.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_sp.global_view.calls.call import (
    NO_RULE,
    Call,
    Rule,
    is_plain,
    is_sequence,
    named,
    whole_is_small,
    writes,
)
from lightning_sp.global_view.calls.taken_tokens import TakenTokens, plain
from lightning_sp.global_view.exchange.movement import as_tokens, brought, counted_through, moved
from lightning_sp.global_view.rules.indexing.chosen import is_choice, put
from lightning_sp.global_view.rules.indexing.taking import slots_of
from lightning_sp.global_view.rules.pointwise import aligned
from lightning_sp.global_view.tensors.copied_views import address_of
from lightning_sp.global_view.tensors.deferred import DeferredTensor
from lightning_sp.global_view.tensors.placement import Placement, part_of
from lightning_sp.global_view.tensors.sequence_tensor import SequenceTensor, whole_of


def masked_scatter(call: Call) -> Any:
    """Put whole rows, one after the other, in the places of tokens that a mask chooses: images into their text."""
    x, mask, source = (call.argument(i, name) for i, name in enumerate(("input", "mask", "source")))
    if not is_sequence(x) or not isinstance(mask, Tensor) or not is_plain(source) or x.placement.inner > 1:
        return NO_RULE
    own = x.placement
    if own.dim >= x.dim() - 1 or mask.dim() != x.dim() or mask.shape[:-1] != x.shape[:-1]:
        return NO_RULE
    if isinstance(mask, SequenceTensor):
        mask = brought(mask, own.storage)
        if mask.placement.dim != own.dim or not mask.placement.same_tokens(own):
            return NO_RULE
    local = mask.local if isinstance(mask, SequenceTensor) else part_of(mask, own)
    if local.shape[-1] != 1 and local.stride(-1) != 0:
        return NO_RULE  # a mask that may differ between the features of a token
    result = _rows_in_places(x, local[..., 0], source)
    return x.renew(x.local.copy_(result)) if call.function.__name__.endswith("_") else SequenceTensor(result, own)


def _rows_in_places(x: SequenceTensor, chosen: Tensor, source: Tensor) -> Tensor:
    """Return this rank's part with whole rows in the places that are chosen. Shapes: (..., E), (...), (N, E) or more -> (..., E)."""
    features = x.shape[-1]
    whole = SequenceTensor(chosen.bool(), x.placement).whole()
    rows, count = source.reshape(-1, features).to(x.dtype), int(whole.sum())
    if len(rows) < count:
        raise RuntimeError(f"{count} tokens are chosen, and there are {len(rows)} rows of {features}")
    if not count:
        return x.local.clone()
    row = part_of((whole.flatten().cumsum(0) - 1).view(whole.shape), x.placement).clamp(min=0, max=len(rows) - 1)
    return torch.where(chosen.bool().unsqueeze(-1), rows[row], x.local)


def setitem(call: Call) -> Any:
    """Write what an index says, in place."""
    x, index, value = call.args
    if not is_sequence(x):
        call.tensors[0].placement.storage.note_reduction()
        return call.on_wholes()  # into what the user has made whole
    if isinstance(index, list) and all(isinstance(each, int) for each in index):
        index = torch.tensor(index, device=x.device)
    if isinstance(index, Tensor) and index.dtype == torch.bool and 0 < index.dim() <= x.placement.dim:
        index = whole_of(index).nonzero(as_tuple=True)  # rows
    if isinstance(index, Tensor) and index.dtype == torch.bool:
        return _by_mask(x, index, value)
    if is_choice(x, index) and x.placement.dim == 0:
        written = put(x, whole_of(index), value)
        if written is not NO_RULE:
            return written
    slots = _without_masks(x, slots_of(x, index))
    if (written := _by_numbers(x, slots, value)) is not NO_RULE:
        return written
    if len(slots) == x.dim() and all(isinstance(each, (slice, int)) for each in slots):
        written = _by_slices(x, slots, value)
        if written is not NO_RULE:
            return written
    if any(each is None for each in slots) and all(each is None or isinstance(each, (slice, int)) for each in slots):
        x[tuple(slots)].copy_(value)  # a view with dims more, or what is written as one is
        return None
    return _as_whole(x, index, value)


def _without_masks(x: SequenceTensor, slots: Sequence[Any]) -> list[Any]:
    """Return an index with the numbers of the places in which its masks are true."""
    found: list[Any] = []
    for each in slots:
        value = torch.as_tensor(each, device=x.device) if isinstance(each, list) else each
        is_mask = isinstance(value, Tensor) and value.dtype == torch.bool and value.dim()
        found += list(whole_of(value).nonzero(as_tuple=True)) if is_mask else [value]
    return found


def _by_numbers(x: SequenceTensor, slots: Sequence[Any], value: Any, *, accumulate: bool = False) -> Any:
    """Write a number or whole tensors to the tokens that whole numbers say, or add them: `x[torch.arange(B), lengths] = value`."""
    own = x.placement
    slots = [torch.as_tensor(each, device=x.device) if isinstance(each, list) else each for each in slots]
    if any(isinstance(each, Tensor) for each in slots):  # beside which a number is an index like these
        slots = [torch.as_tensor(each, device=x.device) if isinstance(each, int) else each for each in slots]
    if any(each is None for each in slots) or len(slots) != x.dim():
        return NO_RULE
    first = [i for i, each in enumerate(slots) if isinstance(each, Tensor)]
    others = {i: each for i, each in enumerate(slots) if not isinstance(each, Tensor)}
    if first and others.get(own.dim) == slice(None):
        if accumulate:
            return NO_RULE
        return _beside(x, slots, first, value)
    if (
        own.dim not in first
        or first[-1] - first[0] >= len(first)
        or not all(isinstance(each, slice) for each in others.values())
    ):
        return NO_RULE
    x = SequenceTensor(x.local[tuple(others.get(i, slice(None)) for i in range(x.dim()))], own)  # a view
    if own.outer * own.inner > 1 or any(slots[i].is_floating_point() for i in first):
        return NO_RULE
    if is_sequence(value):
        if value.numel() > x.local.numel():
            return NO_RULE
        value = value.whole()  # a few tokens
    if any(slots[i].dtype == torch.bool for i in first):
        return NO_RULE
    numbers = torch.broadcast_tensors(*(whole_of(slots[i]).to(x.device) for i in first))  # type: ignore[no-untyped-call]
    position = numbers[first.index(own.dim)] % own.length
    slot_of = torch.full((own.storage.capacity,), -1, device=x.device)
    slot_of[own.storage.positions(x.device)] = torch.arange(own.storage.local_tokens, device=x.device)
    mine = slot_of[position]
    here = mine >= 0
    ahead: list[Any] = [slice(None)] * first[0]
    into = [(mine if i == own.dim else each)[here] for i, each in zip(first, numbers, strict=True)]
    if isinstance(value, Tensor) and value.dim():
        wide = value.to(x.dtype).expand(*x.shape[: first[0]], *position.shape, *x.shape[first[-1] + 1 :])
        value = wide[(*ahead, here)]
    if accumulate:
        if ahead:
            return NO_RULE
        value = torch.as_tensor(value, dtype=x.dtype, device=x.device)
        x.local.index_put_(tuple(into), value, accumulate=True)
        return None
    x.local[(*ahead, *into)] = value
    return None


def _beside(x: SequenceTensor, slots: Sequence[Any], first: Sequence[int], value: Any) -> Any:
    """Write what whole indices of other dims than the sequence's say: one number to what they choose, or more of one of them."""
    own = x.placement
    if not any(is_sequence(slots[i]) for i in first) and not (isinstance(value, Tensor) and value.dim()):
        x.local[tuple(slots)] = value
        return None
    if (
        len(first) != 1
        or is_sequence(slots[first[0]])
        or slots[first[0]].dim() != 1
        or slots[first[0]].dtype == torch.bool
    ):
        return NO_RULE
    shown = SequenceTensor(x.local[tuple(slots)], own)  # of the dims that stay
    if isinstance(value, Tensor) and value.dim():
        wide: Any = value.to(x.dtype).expand(shown.shape)
        if not is_sequence(wide):
            wide = SequenceTensor(part_of(wide, own), own)
        wide = brought(wide, own.storage)
        if wide.placement.dim != own.dim or not wide.placement.same_tokens(own):
            return NO_RULE
        value = wide.local
    x.local[tuple(slots)] = value
    return None


def _as_whole(x: SequenceTensor, index: Any, value: Any) -> Any:
    """Write into the whole, of what has few numbers for each token."""
    if not whole_is_small(x):
        return NO_RULE
    whole = x.whole().clone()
    whole[whole_of(index)] = whole_of(value)
    # In place, for the views of it.
    x.local.copy_(part_of(whole, x.placement))
    return None


def _by_mask(x: SequenceTensor, mask: Tensor, value: Any) -> Any:
    """Write where a mask of the first dims is true: one number, one vector for all, or a row for each."""
    behind = x.dim() - mask.dim()
    wide = mask[(..., *[None] * behind)] if behind else mask
    is_row = isinstance(value, Tensor) and value.dim() == behind + 1 and value.shape[0] != 1
    if is_sequence(value) and mask.dim() == 1 and x.placement.dim == 0:
        written = put(x, whole_of(mask).nonzero().flatten(), value)
        if written is not NO_RULE:
            return written
    if is_sequence(value) or x.placement.dim >= mask.dim() or (is_row and behind != 1):
        return _as_whole(x, mask, value)
    like = Call(name="masked_fill", function=torch.masked_fill, args=(x, wide), kwargs={})
    found = aligned(like)
    if found is NO_RULE:
        return _as_whole(x, mask, value)
    own, where = found[0].args
    chosen = where.local if is_sequence(where) else where
    if is_row:
        x.local.copy_(_rows_in_places(x, chosen[..., 0].expand(x.local.shape[:-1]), value))
    elif isinstance(value, Tensor) and value.dim():
        x.local.copy_(torch.where(chosen, value.to(x.dtype), x.local))
    else:
        own.local.masked_fill_(chosen, value)
    return None


def _by_slices(x: SequenceTensor, slots: Sequence[Any], value: Any) -> Any:
    """Write into some tokens, one after the other, or into one; into other dims as slices say."""
    own = x.placement
    taken = slots[own.dim]
    local_slots = [slice(None) if dim == own.dim else each for dim, each in enumerate(slots)]
    dim = own.dim - sum(isinstance(each, int) for each in slots[: own.dim])
    into = x.local[tuple(local_slots)]
    if taken != slice(None) and own.outer * own.inner > 1:
        if any(each != slice(None) for each in local_slots):
            return NO_RULE
        x = as_tokens(x)
        own = x.placement
    at = range(*taken.indices(own.shown)) if isinstance(taken, slice) else taken % own.shown
    if _stands_there(value, address_of(into, dim, at)):
        return None
    if taken == slice(None) and not isinstance(value, Tensor):
        x.local[tuple(local_slots)] = value
        return None
    if own.outer * own.inner > 1 and taken != slice(None):
        return NO_RULE
    if isinstance(taken, int):
        position = taken % own.length
        if isinstance(value, Tensor) and not is_sequence(value) and value.dim() >= into.dim() - dim:
            value = value.unsqueeze(value.dim() - (into.dim() - dim - 1))
        taken = slice(position, position + 1)
    chosen = range(*taken.indices(own.shown))
    found = _written_part(value, into, own.at(dim), chosen)
    if found is NO_RULE:
        return NO_RULE
    if len(chosen) == own.shown:
        into.copy_(found)
        return None
    positions = own.storage.positions(x.device)
    start, step = chosen.start, chosen.step
    inside = (positions >= start) & (positions < chosen.stop) & ((positions - start) % step == 0)
    into.copy_(torch.where(inside.view([-1 if i == dim else 1 for i in range(into.dim())]), found, into))
    return None


def _stands_there(value: Any, address: Any) -> bool:
    """Return whether a value is a copy of what is written: `x[:, 1:] += 1` adds in place, which writes it, and then writes it again."""
    view = value.of if isinstance(value, TakenTokens) else value.placement.copied if is_sequence(value) else None
    if view is None or view.address is None or isinstance(view.copy, DeferredTensor):
        return False
    return view.is_all(value._local if is_sequence(value) else plain(value), address)


def _written_part(value: Any, into: Tensor, own: Placement, chosen: range) -> Any:
    """Return what is written into this rank's tokens, broadcastable to them; any number where nothing is."""
    if chosen.step < 0 or not len(chosen):
        return NO_RULE
    if not isinstance(value, Tensor):
        return torch.as_tensor(value, dtype=into.dtype, device=into.device)
    dim = own.dim - (into.dim() - value.dim())
    if isinstance(value, SequenceTensor) and value.placement.dim != dim and value.numel() <= into.numel():
        value = value.whole()  # of other tokens, and few
    if isinstance(value, SequenceTensor):
        theirs = value.placement
        if theirs.dim != dim or theirs.shown != len(chosen):
            return NO_RULE
        if len(chosen) == own.shown:
            value = brought(value, own.storage)
            if not value.placement.same_tokens(own):  # joined rows, say: each number of the dim as a token
                tokens = counted_through(own.storage, own.outer, own.length, own.inner)
                value = brought(as_tokens(value), tokens)
                if value.placement.storage is not tokens:
                    return NO_RULE
            return value.local.to(into.dtype)
        value = as_tokens(value)
        if value.placement.outer * value.placement.inner > 1:
            return NO_RULE
        return moved(value, _sources(own.length, chosen), ("written", chosen), own.storage).local.to(into.dtype)
    value = value.to(into.dtype)
    if dim < 0 or value.shape[dim] == 1:
        return value
    if len(chosen) == own.shown:
        return part_of(value, own.at(dim))
    return part_of(value.index_select(dim, _sources(own.length, chosen).clamp(min=0).to(value.device)), own.at(dim))


def _sources(length: int, chosen: range) -> Tensor:
    """Return for each token the number of what is written into it, -1 for nothing. Shapes: () -> (L,), on the CPU."""
    index = torch.full((length,), -1)
    index[chosen.start : chosen.stop : chosen.step] = torch.arange(len(chosen))
    return index


def index_put(call: Call) -> Any:
    """Write to tokens that whole numbers say, or add to them."""
    x, index, value = call.args[:3]
    if not is_sequence(x):
        return NO_RULE
    into = x if writes(call.function) else SequenceTensor(x.local.clone(), replace(x.placement, copied=None))
    if not call.argument(3, "accumulate", False):
        into[tuple(index)] = value
        return into
    slots = _without_masks(into, slots_of(into, tuple(index)))
    return NO_RULE if _by_numbers(into, slots, value, accumulate=True) is NO_RULE else into


def index_fill(call: Call) -> Any:
    """Write one number to the tokens that whole numbers say; or to what stands in other dims."""
    x, dim, index, value = (call.argument(i, name) for i, name in enumerate(("input", "dim", "index", "value")))
    if not is_sequence(x) or is_sequence(index):
        return NO_RULE
    chosen = torch.zeros(x.shape[dim], dtype=torch.bool, device=x.device)
    chosen[index] = True
    chosen = chosen.view([-1 if i == dim % x.dim() else 1 for i in range(x.dim())])
    return x.masked_fill_(chosen, value) if writes(call.function) else x.masked_fill(chosen, value)


def new_like(call: Call) -> Any:
    """Make a tensor of a shape that is given: of the sequence where it is this one's up to the tokens, or one dim of three or more has as
    many; else whole.
    """
    x: SequenceTensor = call.args[0]
    like = torch.empty((), dtype=x.dtype, device=x.device)
    made: Tensor = getattr(like, call.function.__name__)(*call.args[1:], **call.kwargs)
    own = None if call.name == "new_tensor" else _tokens_in(made.shape, x)
    if own is None:
        return made
    shape = list(made.shape)
    shape[own.dim] = own.held
    local = made.narrow(own.dim, 0, 1).expand(shape).clone().requires_grad_(made.requires_grad)
    return SequenceTensor(local, replace(own, copied=None))


def _tokens_in(shape: Sequence[int], x: SequenceTensor) -> Placement | None:
    """Return where the tokens of `x` would be in a shape; None where it shows none, or leaves open which."""
    own = x.placement
    if len(shape) == x.dim() > 1 and tuple(shape[: own.dim + 1]) == tuple(x.shape[: own.dim + 1]):
        return own
    if own.outer * own.inner > 1:
        return None
    rows = math.prod(x.shape[: own.dim])
    if len(shape) == 2 and own.dim and rows > 1 and shape[0] == rows * own.length and shape[1] == x.shape[-1]:
        return replace(own, dim=0, outer=rows)  # rows of tokens, joined
    if len(shape) < 3:
        return None
    found = [dim for dim, size in enumerate(shape) if size == own.shown]
    if len(found) != 1 or (found[0] < own.dim and x.shape[found[0]] == own.shown):
        return None  # as many rows as tokens: it shows rows alone
    return replace(own, dim=found[0])


RULES: dict[str, Rule] = {
    **named("masked_scatter", masked_scatter),
    **named("setitem", setitem),
    **named("index_put", index_put),
    **named("index_fill", index_fill),
    **named("new_zeros new_ones new_full new_empty new_tensor", new_like),
}
