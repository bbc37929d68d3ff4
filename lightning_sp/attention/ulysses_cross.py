"""Ulysses where queries and keys are of two sequences (cross attention): as `ulysses`, with as many tokens of keys as there are.

A message holds, for each destination, this rank's query tokens of its heads and then the key tokens: still one all-to-all a way.

Communicates, sent by rank r of U whose h_r query heads need k_r key-value heads, s query and t key tokens a rank, in elements:

    forward   q, k, v:     B D x sum over u != r of (s h_u + 2 t k_u)      backward  dq, dk, dv:  B D (U-1) (s h_r + 2 t k_r)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_sp.attention.merge import accumulator_dtype
from lightning_sp.attention.ulysses import HeadSplit
from lightning_sp.comm import exchange
from lightning_sp.layout import Range


def exchange_cross(
    q: Tensor, k: Tensor, v: Tensor, split: HeadSplit, rank: int, group: ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Trade tokens for heads: every rank's tokens of this rank's heads.

    Shapes: q (B, H, s, D), k and v (B, K, t, D) -> (U s, B, h, D), (U t, B, 2 k, D).
    Communicates: one all_to_all_single on the Ulysses axis.
    """
    parts = []
    for each in range(split.size):
        heads, keys = slice(*split.queries(each)), slice(*split.keys(each))
        parts.append(q[:, heads].permute(2, 0, 1, 3).reshape(-1))
        parts.append(torch.cat([k[:, keys], v[:, keys]], 1).permute(2, 0, 1, 3).reshape(-1))
    sent = [parts[2 * each].numel() + parts[2 * each + 1].numel() for each in range(split.size)]
    q_shape = (q.shape[2], q.shape[0], _length(split.queries(rank)), q.shape[3])
    kv_shape = (k.shape[2], k.shape[0], 2 * _length(split.keys(rank)), k.shape[3])
    received = exchange(torch.cat(parts), sent, [_size(q_shape) + _size(kv_shape)] * split.size, group)
    pieces = received.split_with_sizes([_size(q_shape), _size(kv_shape)] * split.size)
    return (
        torch.cat([piece.view(q_shape) for piece in pieces[::2]]),
        torch.cat([piece.view(kv_shape) for piece in pieces[1::2]]),
    )


def split_cross(packed_q: Tensor, packed_kv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k, v as views. Shapes: (S, B, h, D), (T, B, 2 k, D) -> (B, h, S, D), (B, k, T, D) twice."""
    k, v = packed_kv.permute(1, 2, 0, 3).chunk(2, 1)
    return packed_q.permute(1, 2, 0, 3), k, v


def exchange_cross_grad(grads: list[Tensor], split: HeadSplit, group: ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """Send the gradients of q, k, v home; those of a key-value head that several ranks used add up, in float32 or more.

    Args:
        grads: (dq, dk, dv); emptied.
        split: which heads each rank holds.
        group: the Ulysses axis.

    Shapes: (B, h, S, D), (B, k, T, D) twice -> (B, H, s, D), (B, K, t, D) twice.
    Communicates: one all_to_all_single on the Ulysses axis.
    """
    dq, dk, dv = grads
    grads.clear()
    size = split.size
    batch, _, queries, dim = dq.shape
    s, t = queries // size, dk.shape[2] // size
    q_parts = dq.permute(2, 0, 1, 3).chunk(size)
    kv_parts = torch.cat([dk, dv], 1).permute(2, 0, 1, 3).chunk(size)
    sent = torch.cat([part.reshape(-1) for pair in zip(q_parts, kv_parts, strict=True) for part in pair])
    shapes = [
        ((s, batch, _length(split.queries(each)), dim), (t, batch, 2 * _length(split.keys(each)), dim))
        for each in range(size)
    ]
    counts = [[_size(shape) for shape in pair] for pair in shapes]
    received = exchange(sent, [sent.numel() // size] * size, [sum(pair) for pair in counts], group)
    pieces = received.split_with_sizes([count for pair in counts for count in pair])
    whole_q = torch.cat([pieces[2 * each].view(shapes[each][0]) for each in range(size)], 2)
    keys = dq.new_zeros((2, t, batch, split.num_kv_heads, dim), dtype=accumulator_dtype(dq.dtype))
    for each in range(size):
        own_k, own_v = pieces[2 * each + 1].view(shapes[each][1]).chunk(2, 2)
        keys[0][:, :, slice(*split.keys(each))] += own_k
        keys[1][:, :, slice(*split.keys(each))] += own_v
    whole_k, whole_v = keys.to(dq.dtype).permute(0, 2, 3, 1, 4).unbind(0)
    return whole_q.permute(1, 2, 0, 3), whole_k, whole_v


def _length(bounds: Range) -> int:
    return bounds[1] - bounds[0]


def _size(shape: tuple[int, ...]) -> int:
    return math.prod(shape)
