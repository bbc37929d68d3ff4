"""Norms whose mean and variance are over the sequence: of batches, groups of channels, single channels, or whole rows; and PReLU's channels.

Mean and variance are one all_reduce each; what is done with them is local.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_sp.global_view.calls.call import NO_RULE, Call, Rule, is_plain, is_sequence, named, placed
from lightning_sp.global_view.rules.along_sequence.reductions import mean
from lightning_sp.global_view.tensors.placement import part_of
from lightning_sp.global_view.tensors.sequence_tensor import SequenceTensor


def _is_split(x: Any) -> bool:
    return is_sequence(x) and x.dim() > 1 and x.placement.inner == 1


def _by_channels(values: Tensor | None, x: SequenceTensor) -> Tensor | None:
    """Return numbers of the channels, dim 1, as they meet a tensor."""
    return None if values is None else values.view(1, -1, *[1] * (x.dim() - 2))


def _scaled(local: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    local = local if weight is None else local * weight
    return local if bias is None else local + bias


def _moments(x: SequenceTensor, dims: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return mean and variance over dims, the sequence's among them, which stay; whole on every rank."""
    x.placement.storage.note_reduction()
    middle = mean(x, list(dims), True)
    return middle, mean(SequenceTensor((x.local - middle).square(), x.placement), list(dims), True)


def batch_norm(call: Call) -> Any:
    """Norm channels over rows and sequence, and renew what is known of them, on every rank alike."""
    names = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
    x, of_mean, of_variance, weight, bias, training, momentum, eps = (
        call.argument(i, name) for i, name in enumerate(names)
    )
    if not _is_split(x) or x.placement.dim == 1:
        return NO_RULE
    dims = [dim for dim in range(x.dim()) if dim != 1]
    count = x.numel() // x.shape[1]
    if training and count < 2:
        return NO_RULE
    if training:
        middle, variance = _moments(x, dims)
        if of_mean is not None:
            share = 0.1 if momentum is None else momentum
            with torch.no_grad():
                of_mean.lerp_(middle.flatten().to(of_mean.dtype), share)
                of_variance.lerp_((variance.flatten() * (count / (count - 1))).to(of_variance.dtype), share)
    else:
        middle, variance = (_by_channels(each, x) for each in (of_mean, of_variance))  # type: ignore[assignment]
    local = (x.local - middle) * torch.rsqrt(variance + (1e-5 if eps is None else eps))
    return SequenceTensor(_scaled(local, _by_channels(weight, x), _by_channels(bias, x)).to(x.dtype), x.placement)


def group_norm(call: Call) -> Any:
    """Norm groups of channels of each row over the sequence."""
    x, groups, weight, bias, eps = (
        call.argument(i, name) for i, name in enumerate(("input", "num_groups", "weight", "bias", "eps"))
    )
    if not _is_split(x):
        return NO_RULE
    own = x.placement
    if own.dim == 0:
        return placed(call.on_locals(), own)
    if own.dim == 1 or own.outer > 1:
        return NO_RULE
    wide = SequenceTensor(x.local.unflatten(1, (groups, -1)), own.at(own.dim + 1))
    middle, variance = _moments(wide, range(2, x.dim() + 1))
    local = ((wide.local - middle) * torch.rsqrt(variance + (1e-5 if eps is None else eps))).flatten(1, 2)
    return SequenceTensor(_scaled(local, _by_channels(weight, x), _by_channels(bias, x)), own)


def instance_norm(call: Call) -> Any:
    """Norm each channel of each row over the sequence, and renew what is known of them, on every rank alike."""
    names = ("input", "running_mean", "running_var", "weight", "bias", "use_input_stats", "momentum", "eps")
    x, of_mean, of_variance, weight, bias, of_input, momentum, eps = (
        call.argument(i, name) for i, name in enumerate(names)
    )
    if not _is_split(x) or x.dim() < 3 or (of_mean is None) != (of_variance is None):
        return NO_RULE
    own = x.placement
    if own.dim == 0 and of_mean is None:
        return placed(call.on_locals(), own)
    if own.dim < 2 or own.outer > 1:
        return NO_RULE
    if of_input is False:
        middle, variance = _by_channels(of_mean, x), _by_channels(of_variance, x)
    else:
        middle, variance = _moments(x, range(2, x.dim()))
        if of_mean is not None:  # the mean over the rows of what each row shows
            count, share = math.prod(x.shape[2:]), 0.1 if momentum is None else momentum
            with torch.no_grad():
                of_mean.lerp_(middle.mean(0).flatten().to(of_mean.dtype), share)
                of_variance.lerp_((variance.mean(0).flatten() * (count / (count - 1))).to(of_variance.dtype), share)
    assert middle is not None
    assert variance is not None
    local = (x.local - middle) * torch.rsqrt(variance + (1e-5 if eps is None else eps))
    return SequenceTensor(_scaled(local, _by_channels(weight, x), _by_channels(bias, x)), own)


def prelu(call: Call) -> Any:
    """Do it on this rank's tokens: with one weight, or one for each channel."""
    x, weight = call.argument(0, "input"), call.argument(1, "weight")
    if not is_sequence(x) or not is_plain(weight) or (weight.numel() > 1 and x.placement.dim == 1):
        return NO_RULE
    return placed(call.on_locals(), x.placement)


def layer_norm(call: Call) -> Any:
    """Norm over last dims, the sequence's among them."""
    names = ("input", "normalized_shape", "weight", "bias", "eps")
    x, shape, weight, bias, eps = (call.argument(i, name) for i, name in enumerate(names))
    if not is_sequence(x) or x.placement.outer * x.placement.inner > 1:
        return NO_RULE
    own, count = x.placement, 1 if isinstance(shape, int) else len(shape)
    middle, variance = _moments(x, range(x.dim() - count, x.dim()))
    local = (x.local - middle) * torch.rsqrt(variance + (1e-5 if eps is None else eps))
    at = own.at(own.dim - (x.dim() - count))
    given = [None if each is None else part_of(each, at) for each in (weight, bias)]
    return SequenceTensor(_scaled(local, *given), own)


RULES: dict[str, Rule] = {
    **named("batch_norm", batch_norm),
    **named("group_norm", group_norm),
    **named("instance_norm", instance_norm),
    **named("layer_norm", layer_norm),
    **named("prelu", prelu),
}
