"""Taking tokens by position: slices, single tokens, index tensors, masks.

A slice that begins with the first token shows fewer tokens, in the same places. Another one moves tokens between ranks, and so does one of
few tokens, which each rank has a share of then: a loop over chunks costs what the whole does. Single tokens, and those of an index tensor or a
mask, are whole on every rank, with the gradient at the rank that has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import EllipsisType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_sp import comm
from lightning_sp.global_view.calls.call import NO_RULE, Call, Rule, is_plain, is_sequence, named
from lightning_sp.global_view.calls.taken_tokens import taken
from lightning_sp.global_view.exchange.movement import as_tokens, moved
from lightning_sp.global_view.rules.indexing.chosen import choose, is_choice
from lightning_sp.global_view.tensors.copied_views import CopiedView, address_of
from lightning_sp.global_view.tensors.deferred import by_source, made
from lightning_sp.global_view.tensors.placement import broadcast
from lightning_sp.global_view.tensors.sequence_tensor import SequenceTensor, whole_of


def getitem(call: Call) -> Any:
    """Take what an index says."""
    x, index = call.args
    if is_plain(x):  # a whole table by tokens of the sequence
        return _from_table(x, index)
    slots = slots_of(x, index)
    if any(isinstance(each, (Tensor, list)) and not _is_number(each) for each in slots):
        return _by_tensors(x, slots)
    return _by_slices(x, slots)


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0 and not is_sequence(value) and value.dtype != torch.bool


def _as_list(value: Any) -> Any:
    """Return an index that is given as a range, a tuple or an array of numpy as a list of numbers."""
    return (
        value.tolist()
        if isinstance(value, (np.ndarray, np.generic))
        else list(value)
        if isinstance(value, (range, tuple))
        else value
    )


def slots_of(x: SequenceTensor, index: Any) -> list[Any]:
    """Return an index with one entry for each dim, and None for each new one."""
    given = [_as_list(each) for each in (index if isinstance(index, tuple) else [index])]

    def width(each: Any) -> int:
        return (
            each.dim()
            if isinstance(each, Tensor) and each.dtype == torch.bool
            else 0
            if each is None or each is True
            else 1
        )

    used = sum(width(each) for each in given if not isinstance(each, EllipsisType))
    full = [slice(None)] * (x.dim() - used)
    at = next((i for i, each in enumerate(given) if isinstance(each, EllipsisType)), None)
    return [*given, *full] if at is None else [*given[:at], *full, *given[at + 1 :]]


def _by_slices(x: SequenceTensor, slots: Sequence[Any]) -> Any:
    own, dim, taken, result_dim = x.placement, -1, None, -1
    local: list[Any] = []
    out = 0
    for each in slots:
        dim += each is not None
        if each is not None and dim == own.dim:
            taken, result_dim = each, out
            local.append(slice(None))
        else:
            local.append(each)
        out += isinstance(each, slice) or each is None or dim == own.dim
    result = SequenceTensor(x.local[tuple(local)], own.at(result_dim))
    if isinstance(taken, slice):
        return take_range(result, *taken.indices(own.shown))
    assert taken is not None
    return take_one(result, int(taken))


def take_range(x: SequenceTensor, start: int, stop: int, step: int) -> Any:
    """Return some tokens, one after the other."""
    own, chosen = x.placement, range(start, stop, step)
    if (start, len(chosen), step) == (0, own.shown, 1):
        return x
    if not chosen:
        return x.local.narrow(own.dim, 0, 0)  # no token: whole on every rank
    if own.inner > 1:
        x = as_tokens(x)
        if x.placement.inner > 1:
            return NO_RULE
    found = _tokens(x, chosen)
    if found is NO_RULE:
        return NO_RULE
    index: Any = (*[slice(None)] * own.dim, slice(start, stop, step))
    copy, place = found.local, replace(found.placement, copied=None)
    view = CopiedView(
        source=x, copy=copy, take=lambda: _tokens(x, chosen).local, put=lambda: x.__setitem__(index, SequenceTensor(copy, place)),
        address=address_of(x.local, own.dim, chosen),
    )  # fmt: skip
    return SequenceTensor(copy, place.as_copy(view))


def _tokens(x: SequenceTensor, chosen: range) -> Any:
    own = x.placement
    if own.outer > 1:
        index = [torch.as_tensor(list(chosen)) if dim == own.dim else slice(None) for dim in range(x.dim())]
        return choose(x, index)
    target = own.storage.fitting(len(chosen))
    if chosen.start or chosen.step != 1 or target is not own.storage:
        return moved(x, torch.as_tensor(list(chosen)), ("slice", chosen), target)
    # Padding repeats the last token: what a function makes of it is as finite as what it makes of that.
    shorter = replace(own, length=len(chosen))
    real = shorter.real(x.local)
    assert real is not None

    def take(local: Tensor) -> Tensor:
        last = _token(SequenceTensor(local.detach(), replace(own, copied=None)), len(chosen) - 1).unsqueeze(own.dim)
        return torch.where(real, local, last)

    return SequenceTensor(by_source(x.local, take), shorter)


def take_one(x: SequenceTensor, position: int) -> Any:
    """Return one token, whole on every rank, without its dim."""
    own = x.placement
    if not -own.shown <= position < own.shown:
        raise IndexError(f"index {position} is out of bounds for dimension {own.dim} with size {own.shown}")
    x = as_tokens(x)
    if x.placement.outer * x.placement.inner > 1:
        return NO_RULE
    index: Any = (*[slice(None)] * own.dim, position)
    address = address_of(x.local, own.dim, position % own.shown)
    return taken(x, lambda: _token(x, position), lambda copy: x.__setitem__(index, copy), address)


def _token(x: SequenceTensor, position: int) -> Tensor:
    index: list[Any] = [slice(None)] * x.dim()
    index[x.placement.dim] = torch.tensor([position], device=x.device)
    local: Tensor = made(_owned(x, index))
    return local.squeeze(x.placement.dim)


def _owned(x: SequenceTensor, index: Sequence[Any]) -> Tensor:
    """Return what whole index tensors say, one of them of positions, whole on every rank: the rank that has a token gives it."""
    own = x.placement
    tensors = [each for each in index if isinstance(each, Tensor)]
    slot_of = torch.full((own.storage.capacity,), -1, device=x.device)
    slot_of[own.storage.positions(x.device)] = torch.arange(own.storage.local_tokens, device=x.device)
    slots = slot_of[index[own.dim] % own.length]
    places = [i for i, each in enumerate(index) if isinstance(each, Tensor)]
    adjacent = places == list(range(places[0], places[-1] + 1))
    shape = broadcast(*(each.shape for each in tensors))
    ahead = places[0] if adjacent else 0
    own.storage.note_reduction()
    at = list(index)
    at[own.dim] = slots.clamp(min=0)

    def take(local: Tensor) -> Tensor:
        taken = local[tuple(at)]
        here = (slots >= 0).expand(shape).reshape(*[1] * ahead, *shape, *[1] * (taken.dim() - ahead - len(shape)))
        return summed(torch.where(here, taken, torch.zeros_like(taken)), x)

    # Some numbers of each token are none of what they are made of.
    return by_source(x.local, take) if _is_full(index[-1]) else take(made(x.local))


def _is_full(index: Any) -> bool:
    return isinstance(index, slice) and index == slice(None)


def summed(local: Tensor, x: SequenceTensor) -> Tensor:
    """Return the sum over the ranks of a tensor's sequence; differentiable."""
    is_bool = local.dtype == torch.bool
    total = comm.sum_over_ranks(local.to(torch.uint8) if is_bool else local, x.placement.storage.group)
    return total.bool() if is_bool else total


def _is_int(value: Any) -> bool:
    return (isinstance(value, int) and not isinstance(value, bool)) or _is_number(value)


def _by_tensors(x: SequenceTensor, slots: Sequence[Any]) -> Any:
    if any(_is_int(each) for each in slots):
        # As torch does, which takes single ones first.
        some = [slice(None)] * x.dim()
        dim = 0
        for each in slots:
            if _is_int(each):
                some[dim] = each
            dim += each.dim() if isinstance(each, Tensor) and each.dtype == torch.bool else each is not None
        left = tuple(each for each in slots if not _is_int(each))
        return _by_slices(x, some)[left]
    own = x.placement
    expanded: list[Any] = []
    for each in slots:
        value = torch.as_tensor(each, device=x.device) if isinstance(each, list) else each
        if isinstance(value, Tensor) and value.dtype == torch.bool:
            expanded += list(whole_of(value).nonzero(as_tuple=True))
        else:
            expanded.append(value)
    dims = [each for each in expanded if each is not None]
    if len(dims) == x.dim() and is_choice(x, dims[own.dim]):
        return choose(x, [each if isinstance(each, slice) else whole_of(each) for each in expanded])
    if any(each is None or isinstance(each, int) for each in expanded) or len(expanded) != x.dim():
        return NO_RULE
    at = expanded[own.dim]
    if not isinstance(at, Tensor):
        return _beside(x, expanded) if at == slice(None) else NO_RULE
    if own.outer * own.inner > 1 or any(isinstance(each, slice) and each != slice(None) for each in expanded):
        return NO_RULE
    return _owned(x, [whole_of(each) for each in expanded])


def _beside(x: SequenceTensor, index: Sequence[Any]) -> Any:
    """Index one other dim by a whole tensor."""
    tensors = [i for i, each in enumerate(index) if isinstance(each, Tensor)]
    if len(tensors) != 1 or is_sequence(index[tensors[0]]):
        return NO_RULE
    own = x.placement
    more = index[tensors[0]].dim() - 1
    return SequenceTensor(x.local[tuple(index)], own.at(own.dim + (more if tensors[0] < own.dim else 0)))


def _from_table(table: Tensor, index: Any) -> Any:
    """Look tokens up in a whole table, along its first dim."""
    given = list(index) if isinstance(index, tuple) else [index]
    if not is_sequence(given[0]) or given[0].dtype == torch.bool or any(each != slice(None) for each in given[1:]):
        return NO_RULE
    return SequenceTensor(table[given[0].local], given[0].placement)


def select(call: Call) -> Any:
    """Take one along a dim."""
    x, dim, index = call.args[0], call.argument(1, "dim"), call.argument(2, "index")
    slots: list[Any] = [slice(None)] * x.dim()
    slots[dim % x.dim()] = int(index)
    return _by_slices(x, slots)


def narrow(call: Call) -> Any:
    """Take a range along a dim."""
    x, dim, start, length = (call.argument(i, name) for i, name in enumerate(("input", "dim", "start", "length")))
    slots: list[Any] = [slice(None)] * x.dim()
    slots[dim % x.dim()] = slice(int(start), int(start) + int(length))
    return _by_slices(x, slots)


def index_select(call: Call) -> Any:
    """Take some along a dim."""
    x, dim, index = (call.argument(i, name) for i, name in enumerate(("input", "dim", "index")))
    if is_plain(x) and is_sequence(index) and dim % x.dim() == 0:
        return _from_table(x, index)
    if not is_sequence(x):
        return NO_RULE
    slots: list[Any] = [slice(None)] * x.dim()
    slots[dim % x.dim()] = index
    return _by_tensors(x, slots)


def gather_tokens(call: Call) -> Any:
    """Gather along the sequence: the result is whole on every rank."""
    x, dim, index = (call.argument(i, name) for i, name in enumerate(("input", "dim", "index")))
    if call.name == "take_along_dim":
        index, dim = (call.argument(i, name) for i, name in enumerate(("indices", "dim"), 1))
    if not is_sequence(x) or not isinstance(dim, int):
        return NO_RULE
    own = x.placement
    if dim % x.dim() != own.dim or own.outer * own.inner > 1:
        return NO_RULE
    if index.dim() != x.dim():
        return NO_RULE
    if call.name == "take_along_dim":
        shape = [own.shown if i == own.dim else size for i, size in enumerate(x.shape)]
        shape[own.dim] = 1
        index = index.expand(broadcast(shape, index.shape))
    index = whole_of(index)
    grid = torch.meshgrid(*(torch.arange(size, device=x.device) for size in index.shape), indexing="ij")
    return _owned(x, [index if i == own.dim else each for i, each in enumerate(grid)])


def masked_select(call: Call) -> Any:
    """Take the numbers for which a mask is true."""
    x, mask = torch.broadcast_tensors(call.argument(0, "input"), call.argument(1, "mask"))  # type: ignore[no-untyped-call]
    return x[mask]


RULES: dict[str, Rule] = {
    **named("masked_select", masked_select),
    **named("getitem", getitem),
    **named("select", select),
    **named("narrow", narrow),
    **named("index_select", index_select),
}
