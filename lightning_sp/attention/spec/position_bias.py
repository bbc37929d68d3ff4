"""Biases by distance, as score functions: ALiBi and T5's relative positions."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightning_sp.attention.spec.score_mod import ScoreMod


def alibi(slopes: Tensor) -> ScoreMod:
    """Return ALiBi: each head's slope times the distance back to the key, which is negative or zero before the query.

    Shapes: slopes (H,). Source: arXiv:2108.12409, section 3.
    """
    return ScoreMod(lambda score, row, head, query, key, learned: score + learned[head] * (key - query), slopes)


def alibi_slopes(num_heads: int) -> Tensor:
    """Return ALiBi's slopes, 2^(-8 i / H) for heads that are a power of 2, else those of the next smaller one and every second between.

    Shapes: () -> (H,), float32. Source: arXiv:2108.12409, section 3, and its authors' code for other numbers of heads.
    """
    whole = 2 ** math.floor(math.log2(num_heads))
    slopes = [2.0 ** (-8.0 * (i + 1) / whole) for i in range(whole)]
    slopes += [2.0 ** (-4.0 * (2 * i + 1) / whole) for i in range(num_heads - whole)]
    return torch.tensor(slopes)


def relative_position_bias(table: Tensor, *, bidirectional: bool, max_distance: int = 128) -> ScoreMod:
    """Return T5's learned bias: one number a head for each bucket of distances between query and key.

    Args:
        table: (buckets, H), learned; it gets its gradient.
        bidirectional: as in T5's encoder; False as in its decoder, where all later keys share one bucket.
        max_distance: in tokens, from which on all share the last bucket.

    Source: T5, arXiv:1910.10683, section 2.1.
    """
    buckets = table.shape[0]
    return ScoreMod(
        lambda score, row, head, query, key, learned: (
            score
            + learned[t5_bucket(key - query, buckets, bidirectional=bidirectional, max_distance=max_distance), head]
        ),
        table,
    )


def t5_bucket(distance: Tensor, buckets: int, *, bidirectional: bool, max_distance: int) -> Tensor:
    """Return the bucket of a distance key - query, int64: one each for small ones, then by their logarithm.

    Source: T5, arXiv:1910.10683, section 2.1; the borders are those of its published checkpoints.
    """
    offset = torch.zeros_like(distance)
    if bidirectional:
        buckets //= 2
        offset = torch.where(distance > 0, buckets, 0)
        distance = distance.abs()
    else:
        distance = (-distance).clamp(min=0)
    exact = buckets // 2
    # In float32, as the checkpoints were trained: a border may fall between two integers otherwise.
    share = torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    far = exact + (share * (buckets - exact)).to(torch.int64)
    return offset + torch.where(distance < exact, distance, far.clamp(max=buckets - 1))
