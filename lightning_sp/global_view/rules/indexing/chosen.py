"""Rows that a whole index chooses out of (rows * tokens, features): an expert's tokens, or the labels that count.

Each rank has those of its own tokens, as many as there are; nothing moves. What is computed of them goes back by the same index:

    state = x.flatten(0, 1)[index]                  (N, E), a tensor of the sequence of N chosen tokens
    out.index_add_(0, index, expert(state))         each to the token that it came from
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_sp.global_view.calls.call import NO_RULE, Call, Rule, is_plain, is_sequence, named
from lightning_sp.global_view.exchange.movement import brought
from lightning_sp.global_view.tensors.placement import Placement, Storage, part_of
from lightning_sp.global_view.tensors.sequence_tensor import SequenceTensor, whole_of


def is_choice(x: SequenceTensor, index: Any) -> bool:
    """Return whether a whole index chooses rows of (rows * tokens, ...) or (tokens, features)."""
    own = x.placement
    return _is_index(index) and own.inner == 1 and (own.outer > 1 or (own.dim == 0 and x.dim() == 2))


def _is_index(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dim() == 1 and not index.is_floating_point()


def _chosen(x: SequenceTensor, index: Tensor) -> tuple[Placement, Tensor, Tensor]:
    """Return where chosen tokens are, the slots of this rank's in its part, and their numbers among the chosen; padding repeats one."""
    own, source = x.placement, x.placement.storage
    at = index.detach().cpu().to(torch.int64)
    if len(at) and (int(at.min()) < -own.shown or int(at.max()) >= own.shown):
        raise IndexError(f"index {int(at.max())} is out of bounds for dimension {own.dim} with size {own.shown}")
    at = at % own.shown
    key = ("chosen", own.outer, own.length, at.numpy().tobytes())
    if key not in source.plans:
        source.plans[key] = _plan(at, own, source)
    target, slots, numbers = source.plans[key]
    placement = Placement(storage=target, dim=own.dim, length=len(at))
    return placement, slots.to(x.device), numbers.to(x.device)


def _plan(at: Tensor, own: Placement, source: Storage) -> tuple[Storage, Tensor, Tensor]:
    size = source.layout.size
    owner, slot = torch.zeros(source.capacity, dtype=torch.int64), torch.zeros(source.capacity, dtype=torch.int64)
    for rank in range(size):
        places = source.positions_of(rank)
        owner[places], slot[places] = rank, torch.arange(len(places))
    row, token = at // own.length, at % own.length
    numbers = [torch.nonzero(owner[token] == rank).flatten() for rank in range(size)]
    most = max(map(len, numbers))
    behind = torch.arange(len(at), size * most)
    spare = torch.split(behind, [most - len(each) for each in numbers])
    target = source.of_places(torch.stack([torch.cat(pair) for pair in zip(numbers, spare, strict=True)]))
    mine = numbers[source.rank]
    slots = row[mine] * source.local_tokens + slot[token[mine]]
    missing = most - len(mine)
    slots = torch.cat([slots, (slots[-1:] if len(slots) else torch.zeros(1, dtype=torch.int64)).expand(missing)])
    return (
        target,
        slots,
        torch.cat([mine, (mine[-1:] if len(mine) else torch.zeros(1, dtype=torch.int64)).expand(missing)]),
    )


def choose(x: SequenceTensor, index: Sequence[Any]) -> Any:
    """Return chosen tokens.

    Args:
        x: (rows * tokens, ...).
        index: one entry for each dim and None for new ones: of the sequence's dim numbers (N,), of others slices, numbers or (N,) too.
    """
    own, dims = x.placement, [i for i, each in enumerate(index) if each is not None]
    at = dims[own.dim]
    advanced = [i for i, each in enumerate(index) if isinstance(each, (Tensor, int))]
    others = [index[i] for i in advanced if i != at]
    if any(isinstance(each, Tensor) and (each.dim() != 1 or len(each) != len(index[at])) for each in others):
        return NO_RULE
    placement, slots, numbers = _chosen(x, index[at])
    if not placement.length:
        return x.local[tuple(each[:0] if isinstance(each, Tensor) else each for each in index)]
    local = [slots if i == at else each[numbers] if isinstance(each, Tensor) else each for i, each in enumerate(index)]
    adjacent = advanced == list(range(advanced[0], advanced[-1] + 1))
    return SequenceTensor(x.local[tuple(local)], placement.at(advanced[0] if adjacent else 0))


def index_add(call: Call) -> Any:
    """Add rows to the tokens that a whole index chooses; or put them there."""
    x, dim, index = call.args[0], call.argument(1, "dim"), call.argument(2, "index")
    source, alpha = call.argument(3, "source"), call.kwargs.get("alpha", 1)
    if (
        not is_sequence(x)
        or not isinstance(source, Tensor)
        or not _is_index(index)
        or x.placement.inner > 1
        or dim % x.dim() != x.placement.dim
    ):
        return NO_RULE
    found = _rows(x, whole_of(index), source)
    if found is NO_RULE:
        return NO_RULE
    slots, rows = found
    in_place = call.function.__name__.endswith("_")
    into = x.local if in_place else x.local.clone()
    if call.name == "index_add":
        into.index_add_(x.placement.dim, slots, rows, alpha=alpha)
    else:
        into.index_copy_(x.placement.dim, slots, rows)
    return x if in_place else SequenceTensor(into, replace(x.placement, copied=None))


def put(x: SequenceTensor, index: Tensor, value: Any) -> Any:
    """Write rows to the tokens that a whole index chooses, in place."""
    if not isinstance(value, Tensor) or value.dim() < x.dim() - x.placement.dim:
        placement, slots, _ = _chosen(x, index)
        mine = slots[placement.storage.positions(x.device) < placement.length]
        where: Any = (*[slice(None)] * x.placement.dim, mine)
        x.local[where] = value
        return None
    found = _rows(x, index, value)
    if found is NO_RULE:
        return NO_RULE
    slots, rows = found
    into: Any = (*[slice(None)] * x.placement.dim, slots)
    x.local[into] = rows
    return None


def _rows(x: SequenceTensor, index: Tensor, source: Tensor) -> Any:
    """Return the slots of chosen tokens in this rank's part, and the rows for them; NO_RULE where they lie otherwise."""
    own = x.placement
    placement, slots, _ = _chosen(x, index)
    if not placement.length:
        return slots[:0], source.new_zeros(
            [0 if i == own.dim else size for i, size in enumerate(x.local.shape)], dtype=x.dtype
        )
    if isinstance(source, SequenceTensor):
        source = brought(source, placement.storage)
        if source.placement.dim != own.dim or not source.placement.same_tokens(placement):
            return NO_RULE
        local = source.local
    elif is_plain(source) and source.shape[own.dim] == placement.length:
        local = part_of(source, placement)
    else:
        return NO_RULE
    real = torch.nonzero(placement.storage.positions(x.device) < placement.length).flatten()
    return slots[real], local.index_select(own.dim, real).to(x.dtype)


RULES: dict[str, Rule] = named("index_add index_copy", index_add)
