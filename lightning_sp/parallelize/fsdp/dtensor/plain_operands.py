"""Plain tensors beside sharded ones, in a hook or an optimizer, which torch refuses: `gradient.add_(noise)`, `weight.data * mask`.

A plain tensor that all ranks hold alike is whole on each of them, and each shard meets its part of it. One that differs is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_map

from lightning_sp import comm
from lightning_sp.errors import SequenceParallelError

# That give another tensor; those in place are `sharded_parts.py`'s.
BESIDE = (
    *("add", "sub", "mul", "div", "maximum", "minimum", "masked_fill", "where", "lerp", "addcmul", "addcdiv"),
    *("eq", "ne", "lt", "le", "gt", "ge"),
    *("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__"),
    *("__lt__", "__le__", "__gt__", "__ge__"),
)  # fmt: skip
_REFUSED = "mixed torch.Tensor and DTensor"  # torch's words, before anything is done
# Odd numbers without a pattern, of SplitMix64.
_OF_BITS, _OF_PLACES = -0x61C8864680B583EB, -0x40A7B892E31B1A47


def beside_plain(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of a sharded tensor that takes plain ones beside it. Every rank must call it.

    Communicates: where it is given one, an all_reduce of 16 bytes for each.

    Raises:
        SequenceParallelError: one that differs between ranks; on all of them.
    """

    @wraps(original)
    def method(self: DTensor, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(self, *args, **kwargs)
        except RuntimeError as error:
            given = [args, kwargs]
            if _REFUSED not in str(error) or _learns(given):
                raise
        whole = tree_map(lambda value: _replicated(value, self), [args, kwargs])
        return original(self, *whole[0], **whole[1])

    return method


def _learns(given: Any) -> bool:
    found: list[bool] = []
    tree_map(
        lambda value: found.append(
            isinstance(value, Tensor) and not isinstance(value, DTensor) and value.requires_grad
        ),
        given,
    )
    return any(found)


def _replicated(value: Any, like: DTensor) -> Any:
    """Return a plain tensor as one that is whole on every rank of a sharded one's mesh; anything else as it is."""
    if not isinstance(value, Tensor) or isinstance(value, DTensor) or value.numel() == 1:
        return value
    if not comm.all_equal(_digest(value).to(like.device)):
        raise SequenceParallelError(
            f"a tensor of shape {tuple(value.shape)} that differs between ranks meets a sharded one of shape {tuple(like.shape)}: each rank "
            "would go on with its own part of it; draw it as the sharded one (torch.randn_like(gradient)), or by a generator with one seed, or "
            "make it of what all ranks know"
        )
    return DTensor.from_local(value, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False)  # type: ignore[no-untyped-call,unused-ignore]


def _digest(value: Tensor) -> Tensor:
    """Return a number, (1,) of int64, that differs, almost surely, where elements do."""
    bits = value.detach().reshape(-1).to(torch.float64).view(torch.int64)
    mixed = bits * _OF_BITS + torch.arange(len(bits), device=bits.device) * _OF_PLACES
    return (mixed ^ (mixed >> 32)).sum().reshape(1)
