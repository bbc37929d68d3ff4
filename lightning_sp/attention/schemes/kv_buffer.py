"""Keys and values as they travel: packed token-major, so that any range of tokens is one contiguous message.

S tokens, B batch, K key-value heads, D head dim: (S, 2, B, K, D).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_sp.attention.plan.intervals import Range


def packed_shape(k: Tensor) -> tuple[int, ...]:
    """Return the shape of packed keys and values. Shapes: k (B, K, S, D)."""
    batch, heads, tokens, dim = k.shape
    return tokens, 2, batch, heads, dim


def pack(k: Tensor, v: Tensor) -> Tensor:
    """Return both in new memory. Shapes: (B, K, S, D) twice -> (S, 2, B, K, D)."""
    packed = k.new_empty(packed_shape(k))
    pack_into(packed, k, v)
    return packed


def pack_into(packed: Tensor, k: Tensor, v: Tensor) -> None:
    """Write both into packed memory. Shapes: (S, 2, B, K, D), (B, K, S, D) twice."""
    packed[:, 0] = k.permute(2, 0, 1, 3)
    packed[:, 1] = v.permute(2, 0, 1, 3)


def unpack(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Return views. Shapes: (S, 2, B, K, D) -> (B, K, S, D) twice."""
    k, v = packed.unbind(1)
    return k.permute(1, 2, 0, 3), v.permute(1, 2, 0, 3)


def taken(packed: Tensor, ranges: Sequence[Range]) -> Tensor:
    """Return the tokens of the ranges, one after the other: a view where there is one range."""
    if len(ranges) == 1:
        return packed[slice(*ranges[0])]
    return torch.cat([packed[slice(*held)] for held in ranges]) if ranges else packed[:0]


def length(ranges: Sequence[Range]) -> int:
    """Return the tokens of all ranges."""
    return sum(end - start for start, end in ranges)
