"""Convolutions: over the sequence the sum over the kernel's places of tokens that are moved by them, each times its weight.

Other dims of an image are convolved as they are. Where the sequence numbers the images all is local. Where it numbers the channels that a
kernel of width 1 mixes, as in a gate over tokens, each rank convolves its own, and the sum over the ranks is whole on each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_sp import comm
from lightning_sp.global_view.calls.call import NO_RULE, Call, Rule, is_plain, is_sequence, named, placed
from lightning_sp.global_view.exchange.movement import moved
from lightning_sp.global_view.tensors.placement import part_of
from lightning_sp.global_view.tensors.sequence_tensor import SequenceTensor

_NAMES = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_NAMES_TRANSPOSED = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")


def convolution(call: Call) -> Any:
    """Convolve along the sequence, and along other dims."""
    x, weight, bias, stride, padding, dilation, groups = (call.argument(i, name) for i, name in enumerate(_NAMES))
    spatial = int(call.name[4])
    if not _is_of_sequence(x, weight, spatial):
        return NO_RULE
    own = x.placement
    if own.dim == 0:
        return placed(call.on_locals(), own) if own.inner == 1 else NO_RULE
    if own.dim == 1:
        return _of_channels(call, x, weight, bias)
    if own.outer * own.inner > 1:
        return NO_RULE
    at = own.dim - 2
    strides, dilations = _each(stride, 1, spatial), _each(dilation, 1, spatial)
    widths = list(weight.shape[2:])
    if padding == "same":
        totals = [d * (width - 1) for d, width in zip(dilations, widths, strict=True)]
        if any(total % 2 for total in totals):  # one place more behind
            wide = torch.nn.functional.pad(
                x, [n for total in reversed(totals) for n in (total // 2, total - total // 2)]
            )
            return call.function(wide, weight, bias, stride or 1, 0, dilation or 1, groups or 1)
        paddings = [total // 2 for total in totals]
    else:
        paddings = _each(0 if padding == "valid" else padding, 0, spatial)
    length = (own.length + 2 * paddings[at] - dilations[at] * (widths[at] - 1) - 1) // strides[at] + 1
    if length <= 0:
        return NO_RULE
    starts = torch.arange(length) * strides[at] - paddings[at]
    places = [starts + k * dilations[at] for k in range(widths[at])]
    key = ("conv", strides[at], paddings[at], dilations[at])
    # What a place of the kernel does along the sequence is done by the moves.
    others = {"stride": strides, "padding": paddings, "dilation": dilations}
    for given, none in zip(others.values(), (1, 0, 1), strict=True):
        given[at] = none
    function = getattr(torch.nn.functional, f"conv{spatial}d")

    def tap(tokens: Tensor, k: int) -> Tensor:
        result: Tensor = function(tokens, weight.narrow(own.dim, k, 1), groups=groups or 1, **others)
        return result

    return _summed(x, places, key, tap, bias)


def _of_channels(call: Call, x: SequenceTensor, weight: Tensor, bias: Any) -> Any:
    """Convolve by a kernel of width 1 where tokens are the channels that are mixed. Shapes: (B, L, ...), (C, L, ...) -> (B, C, ...) whole.

    Communicates: one all_reduce of the result, one of its cotangent.
    """
    own = x.placement
    # In groups; or wider, as of sounds (rows, channels, times), whose sequence is another dim.
    if weight.shape[1] != own.shown or max(weight.shape[2:]) > 1:
        return NO_RULE
    own.storage.note_reduction()
    options = {name: call.argument(i, name) for i, name in enumerate(_NAMES) if i > 2}
    given = {name: value for name, value in options.items() if value is not None}
    local = call.function(own.without_padding(x.local, 0), part_of(weight, own), **given)
    total = comm.sum_over_ranks(local, own.storage.group)
    return total if bias is None else total + bias.view(1, -1, *[1] * (total.dim() - 2))


def transposed(call: Call) -> Any:
    """Convolve transposed along the sequence, and along other dims."""
    x, weight, bias, *given, groups, dilation = (call.argument(i, name) for i, name in enumerate(_NAMES_TRANSPOSED))
    spatial = int(call.name[-2])
    if not _is_of_sequence(x, weight, spatial):
        return NO_RULE
    own = x.placement
    if own.dim < 2 or own.outer * own.inner > 1:
        return placed(call.on_locals(), own) if own.dim == 0 and own.inner == 1 else NO_RULE
    at, width = own.dim - 2, weight.shape[own.dim]
    names = ("stride", "padding", "output_padding", "dilation")
    others = {
        name: _each(each, none, spatial)
        for name, each, none in zip(names, [*given, dilation], (1, 0, 0, 1), strict=True)
    }
    stride, padding, more, step = (each[at] for each in others.values())
    length = (own.length - 1) * stride - 2 * padding + step * (width - 1) + more + 1
    if length <= 0:
        return NO_RULE
    ends = torch.arange(length) + padding
    places = []
    for k in range(width):
        behind = ends - k * step
        places.append(torch.where(behind % stride == 0, behind.div(stride, rounding_mode="floor"), -1))
    for each, none in zip(others.values(), (1, 0, 0, 1), strict=True):
        each[at] = none
    function = getattr(torch.nn.functional, f"conv_transpose{spatial}d")

    def tap(tokens: Tensor, k: int) -> Tensor:
        result: Tensor = function(tokens, weight.narrow(own.dim, k, 1), groups=groups or 1, **others)
        return result

    return _summed(x, places, ("transposed", stride, padding, step, more), tap, bias)


def _is_of_sequence(x: Any, weight: Any, spatial: int) -> bool:
    return is_sequence(x) and is_plain(weight) and x.dim() == spatial + 2


def _each(value: Any, none: int, count: int) -> list[int]:
    """Return a number for each spatial dim."""
    if value is None:
        return [none] * count
    given = [int(each) for each in value] if isinstance(value, (tuple, list)) else [int(value)]
    return given * count if len(given) == 1 else given


def _summed(
    x: SequenceTensor, places: list[Tensor], key: Any, tap: Callable[[Tensor, int], Tensor], bias: Tensor | None
) -> SequenceTensor:
    """Return the sum of what each place of the kernel gives. Shapes: (B, C, ..., L, ...) -> (B, C', ..., N, ...)."""
    own, length = x.placement, len(places[0])
    target = own.storage.fitting(length)
    total: Tensor | None = None
    for k, at in enumerate(places):
        index = torch.where((at >= 0) & (at < own.length), at, -1)
        each = tap(moved(x, index, (key, k), target).local, k)
        total = each if total is None else total + each
    assert total is not None
    if bias is not None:
        total = total + bias.view(1, -1, *[1] * (total.dim() - 2))
    return SequenceTensor(total, replace(own, storage=target, length=length, copied=None))


RULES: dict[str, Rule] = {
    **named("conv1d conv2d conv3d", convolution),
    **named("conv_transpose1d conv_transpose2d conv_transpose3d", transposed),
}
