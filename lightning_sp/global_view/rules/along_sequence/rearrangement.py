"""Functions that put tokens into other places: flip, roll, padding and joining along the sequence, pieces of it, repeated ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_sp.global_view.calls.call import NO_RULE, Call, Rule, is_plain, is_sequence, named
from lightning_sp.global_view.calls.taken_tokens import taken
from lightning_sp.global_view.exchange.movement import as_tokens, brought, moved
from lightning_sp.global_view.rules.indexing.taking import take_range
from lightning_sp.global_view.tensors.copied_views import CopiedView
from lightning_sp.global_view.tensors.sequence_tensor import SequenceTensor


def flip(call: Call) -> Any:
    """Turn the sequence around, other dims with it."""
    x, *dims = call.args
    given = call.kwargs.get("dims", dims[0] if dims and not isinstance(dims[0], int) else dims)
    chosen = [each % x.dim() for each in ([given] if isinstance(given, int) else given)]
    x = as_tokens(x)
    own = x.placement
    if own.dim not in chosen or own.outer * own.inner > 1:
        return NO_RULE
    others = [each for each in chosen if each != own.dim]
    turned = moved(x, torch.arange(own.length).flip(0), "flip")
    return SequenceTensor(turned.local.flip(others), turned.placement) if others else turned


def roll(call: Call) -> Any:
    """Roll along the sequence."""
    x, shifts, dims = call.args[0], call.argument(1, "shifts"), call.argument(2, "dims")
    shift, dim = (each[0] if isinstance(each, (tuple, list)) and len(each) == 1 else each for each in (shifts, dims))
    if isinstance(shifts, (tuple, list)) and isinstance(dims, (tuple, list)) and len(dims) == len(shifts) > 1:
        for each, at in zip(shifts, dims, strict=True):
            x = torch.roll(x, each, at)
        return x
    x = as_tokens(x)
    own = x.placement
    if not isinstance(shift, int) or not isinstance(dim, int) or dim % x.dim() != own.dim or own.outer * own.inner > 1:
        return NO_RULE
    return moved(x, torch.arange(own.length).roll(shift), ("roll", shift))


def pad(call: Call) -> Any:
    """Add places along the sequence, in front of it, behind it, or take some away, with one value."""
    x, sizes = call.args[0], list(call.argument(1, "pad"))
    own, mode = x.placement, call.argument(2, "mode", "constant")
    if own.outer * own.inner > 1:
        return NO_RULE
    at = 2 * (x.dim() - 1 - own.dim)
    if at >= len(sizes):
        return NO_RULE
    front, behind = sizes[at : at + 2]
    value = call.argument(3, "value", 0) or 0
    length = own.length + front + behind
    if length <= 0:
        return NO_RULE
    index = _padded(torch.arange(length) - front, own.length, mode)
    if index is None:
        return NO_RULE
    result = moved(x, index, ("pad", front, behind, mode), own.storage.for_length(length), value)
    sizes[at : at + 2] = [0, 0]
    if not any(sizes):
        return result
    # Each dim's padding is of that dim alone, whatever its kind.
    return SequenceTensor(torch.nn.functional.pad(result.local, sizes, mode=mode, value=value), result.placement)


def _padded(places: Tensor, length: int, mode: str) -> Tensor | None:
    """Return which token stands at each place, -1 for a value; None where torch has no such padding."""
    if mode == "constant":
        return torch.where((places >= 0) & (places < length), places, -1)
    far = max(-int(places[0]), int(places[-1]) - length + 1)
    if mode == "replicate":
        return places.clamp(0, length - 1)
    if mode == "circular":
        return places % length if far <= length else None
    if mode == "reflect" and far < length:
        return length - 1 - (length - 1 - places.abs()).abs()
    return None


def cat(call: Call) -> Any:
    """Join tensors along the sequence: of it, or whole ones, a class token say."""
    parts, dim = list(call.args[0]), call.argument(1, "dim", call.kwargs.get("axis", 0))
    like = max(call.tensors, key=lambda each: each.numel())
    own = like.placement
    if call.name == "stack" or dim % like.dim() != own.dim or own.outer * own.inner > 1:
        return NO_RULE
    few = like.local.numel()
    # A part whose sequence lies in another dim, a state of as many features as there are tokens say, is whole for this.
    parts = [
        each.whole() if is_sequence(each) and each.placement.dim != own.dim and each.numel() <= few else each
        for each in parts
    ]
    parts = [brought(each, own.storage) if is_sequence(each) else each for each in parts]
    parts = [each for each in parts if not (each.dim() == 1 and each.shape[0] == 0) and each.shape[own.dim]]
    total = sum(each.shape[own.dim] for each in parts)
    target = own.storage.for_length(total)
    result: SequenceTensor | None = None
    start = 0
    for each in parts:
        length = each.shape[own.dim]
        placed = _at(each, like, start, total, target)
        if placed is None:
            return NO_RULE
        result = placed if result is None else _chosen(placed, result, start)
        start += length
    return result


def _at(part: Any, like: SequenceTensor, start: int, total: int, target: Any) -> SequenceTensor | None:
    """Return a part in its place of the whole, zeros elsewhere."""
    places = torch.arange(total) - start
    length = part.shape[like.placement.dim]
    index = torch.where((places >= 0) & (places < length), places, -1)
    if is_sequence(part):
        if part.placement.dim != like.placement.dim or part.placement.outer * part.placement.inner > 1:
            return None
        return moved(part, index, ("part", start), target)
    if not is_plain(part):
        return None
    dim = like.placement.dim
    own = target.positions(part.device)
    slots = torch.cat([index, index[-1:].expand(target.capacity - total)]).to(part.device)[own]
    taken = part.index_select(dim, slots.clamp(min=0))
    shape = [-1 if i == dim else 1 for i in range(part.dim())]
    local = torch.where((slots >= 0).view(shape), taken, torch.zeros_like(taken))
    return SequenceTensor(local, replace(like.placement, storage=target, length=total))


def _chosen(new: SequenceTensor, old: SequenceTensor, start: int) -> SequenceTensor:
    own = new.placement
    places = own.storage.positions(new.device)
    inside = (places >= start).view([-1 if i == own.dim else 1 for i in range(new.dim())])
    return SequenceTensor(torch.where(inside, new.local, old.local), own)


def pieces(call: Call) -> Any:
    """Cut along the sequence into pieces, each a slice; copies here."""
    x, dim = call.args[0], call.argument(2, "dim", 0)
    if not is_sequence(x) or not isinstance(dim, int) or dim % x.dim() != x.placement.dim:
        return NO_RULE
    # Where each piece begins and ends is seen on the places' numbers.
    cut = call.function(torch.arange(x.placement.shown), *call.args[1:2], **_without_dim(call))
    found = [take_range(x, int(each[0]), int(each[-1]) + 1, 1) if len(each) else NO_RULE for each in cut]
    return NO_RULE if any(each is NO_RULE for each in found) else type(cut)(found)


def _without_dim(call: Call) -> dict[str, Any]:
    return {name: value for name, value in call.kwargs.items() if name != "dim"}


def single_tokens(call: Call) -> Any:
    """Take all tokens apart, each whole on every rank: one all_gather of all."""
    x, dim = call.args[0], call.argument(1, "dim", 0)
    own = x.placement
    if dim % x.dim() != own.dim or own.outer * own.inner > 1:
        return NO_RULE
    own.storage.note_reduction()
    return taken(x, x.whole, x.copy_).unbind(own.dim)


def iterate(call: Call) -> Any:
    """Go through the tokens, each whole on every rank."""
    found = single_tokens(Call(name="unbind", function=torch.unbind, args=(call.args[0], 0), kwargs={}))
    return found if found is NO_RULE else iter(found)


def diagonal(call: Call) -> Any:
    """Take the diagonal of matrices, of whose two dims the sequence may be one."""
    x = call.args[0]
    given = [
        call.argument(i, name, default)
        for i, (name, default) in enumerate((("offset", 0), ("dim1", 0), ("dim2", 1)), 1)
    ]
    offset, one, other = given[0], given[1] % x.dim(), given[2] % x.dim()
    own = x.placement
    if own.dim not in (one, other):
        return SequenceTensor(x.local.diagonal(*given), own.at(own.dim - sum(dim < own.dim for dim in (one, other))))
    beside = other if own.dim == one else one
    if offset or own.outer * own.inner > 1 or x.shape[beside] != own.shown:
        return NO_RULE
    at = own.storage.positions(x.device).clamp(max=own.length - 1)

    def take() -> Tensor:
        rows = x.local.movedim((own.dim, beside), (-2, -1))
        found: Tensor = rows[..., torch.arange(len(at), device=x.device), at]
        return found

    local, place = take(), own.at(x.dim() - 2)

    def put() -> None:
        """Write the diagonal: here a number of each row."""
        into = x.local.movedim((own.dim, beside), (-2, -1))
        into[..., torch.arange(len(at), device=x.device), at] = local
        if own.copied is not None:  # of some rows, say
            own.copied.write()

    return SequenceTensor(local, place.as_copy(CopiedView(source=x, copy=local, take=take, put=put)))


def repeat(call: Call) -> Any:
    """Repeat the sequence behind itself, other dims with it."""
    x, *times = call.args
    given = list(times[0] if times and not isinstance(times[0], int) else times or call.kwargs.get("repeats", ()))
    own = x.placement
    given = [1] * (x.dim() - len(given)) + given
    dim = own.dim + len(given) - x.dim()
    count = given[dim]
    if own.outer * own.inner > 1 or count < 1:
        return NO_RULE
    index = torch.arange(own.length).repeat(count)
    longer = moved(x, index, ("repeat", count), own.storage.for_length(len(index)))
    given[dim] = 1
    return SequenceTensor(longer.local.repeat(given), longer.placement.at(dim))


def repeat_tokens(call: Call) -> Any:
    """Repeat each token, so many times, or as often as whole numbers say."""
    x, times, dim = (call.argument(i, name) for i, name in enumerate(("input", "repeats", "dim")))
    if not is_sequence(x) or not isinstance(dim, int) or dim % x.dim() != x.placement.dim:
        return NO_RULE
    own = x.placement
    if own.outer * own.inner > 1:
        return NO_RULE
    times = times.whole() if isinstance(times, SequenceTensor) else times
    times = times.cpu() if isinstance(times, Tensor) else times
    index = torch.arange(own.length).repeat_interleave(times)
    if not len(index):
        return NO_RULE
    key = ("repeat tokens", times if isinstance(times, int) else tuple(times.tolist()))
    return moved(x, index, key, own.storage.for_length(len(index)))


RULES: dict[str, Rule] = {
    **named("split chunk tensor_split split_with_sizes", pieces),
    **named("diagonal", diagonal),
    **named("unbind", single_tokens),
    **named("iter", iterate),
    **named("repeat tile", repeat),
    **named("repeat_interleave", repeat_tokens),
    "flip": flip,
    "roll": roll,
    "pad": pad,
    "cat": cat,
    "concat": cat,
    "concatenate": cat,
}
