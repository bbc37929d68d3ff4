"""Functions that put tokens into other places: flip, roll, padding and joining along the sequence, convolutions over it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_sp.global_view.call import NO_RULE, Call, Rule, is_plain, is_sequence
from lightning_sp.global_view.movement import brought, moved
from lightning_sp.global_view.sequence_tensor import SequenceTensor


def flip(call: Call) -> Any:
    """Turn the sequence around, other dims with it."""
    x, *dims = call.args
    given = call.kwargs.get("dims", dims[0] if dims and not isinstance(dims[0], int) else dims)
    chosen = [each % x.dim() for each in ([given] if isinstance(given, int) else given)]
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
    own = x.placement
    if not isinstance(shift, int) or not isinstance(dim, int) or dim % x.dim() != own.dim or own.outer * own.inner > 1:
        return NO_RULE
    return moved(x, torch.arange(own.length).roll(shift), ("roll", shift))


def pad(call: Call) -> Any:
    """Add places along the sequence, in front of it, behind it, or take some away, with one value."""
    x, sizes = call.args[0], list(call.argument(1, "pad"))
    own = x.placement
    if call.argument(2, "mode", "constant") != "constant" or own.outer * own.inner > 1:
        return NO_RULE
    at = 2 * (x.dim() - 1 - own.dim)
    if at >= len(sizes):
        return NO_RULE
    front, behind = sizes[at : at + 2]
    value = call.argument(3, "value", 0) or 0
    length = own.length + front + behind
    if length <= 0:
        return NO_RULE
    places = torch.arange(length) - front
    index = torch.where((places >= 0) & (places < own.length), places, -1)
    result = moved(x, index, ("pad", front, behind), own.storage.for_length(length), value)
    sizes[at : at + 2] = [0, 0]
    if not any(sizes):
        return result
    return SequenceTensor(torch.nn.functional.pad(result.local, sizes, value=value), result.placement)


def cat(call: Call) -> Any:
    """Join tensors along the sequence: of it, or whole ones, a class token say."""
    parts, dim = list(call.args[0]), call.argument(1, "dim", call.kwargs.get("axis", 0))
    like = call.tensors[0]
    own = like.placement
    if call.name == "stack" or dim % like.dim() != own.dim or own.outer * own.inner > 1:
        return NO_RULE
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


def conv1d(call: Call) -> Any:
    """Convolve along the sequence: the sum over the kernel of tokens that are moved by its places, each times its weight."""
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    given = [call.argument(i, name) for i, name in enumerate(names)]
    x, weight, bias = given[:3]
    stride, padding, dilation = (_single(each, default) for each, default in zip(given[3:6], (1, 0, 1), strict=True))
    groups = given[6] or 1
    if not is_sequence(x) or x.dim() != 3 or x.placement.dim != 2 or x.placement.outer * x.placement.inner > 1:
        return NO_RULE
    width = weight.shape[2]
    if stride != 1 or padding == "valid":
        return NO_RULE if stride != 1 else _convolved(x, weight, bias, 0, dilation, groups)
    if padding == "same":
        if dilation * (width - 1) % 2:
            return NO_RULE
        padding = dilation * (width - 1) // 2
    return _convolved(x, weight, bias, int(padding), dilation, groups)


def _single(value: Any, default: Any) -> Any:
    if value is None:
        return default
    return value[0] if isinstance(value, (tuple, list)) else value


def _convolved(x: SequenceTensor, weight: Tensor, bias: Tensor | None, padding: int, dilation: int, groups: int) -> Any:
    own, width = x.placement, weight.shape[2]
    length = own.length + 2 * padding - dilation * (width - 1)
    if length <= 0:
        return NO_RULE
    target = own.storage.for_length(length)
    total: Tensor | None = None
    for k in range(width):
        places = torch.arange(length) + k * dilation - padding
        index = torch.where((places >= 0) & (places < own.length), places, -1)
        tokens = moved(x, index, ("conv", k * dilation - padding), target).local  # (B, C, s)
        each = torch.nn.functional.conv1d(tokens, weight[:, :, k : k + 1], groups=groups)
        total = each if total is None else total + each
    assert total is not None
    if bias is not None:
        total = total + bias.view(1, -1, 1)
    return SequenceTensor(total, replace(own, storage=target, length=length))


RULES: dict[str, Rule] = {
    "flip": flip,
    "roll": roll,
    "pad": pad,
    "cat": cat,
    "concat": cat,
    "concatenate": cat,
    "conv1d": conv1d,
}
