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

from lightning_sp.attention.schemes.ulysses import HeadSplit
from lightning_sp.attention.spec.accumulator import accumulator_dtype
from lightning_sp.comm.collectives import exchange
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


def pack_cross_gradients(grads: list[Tensor], size: int) -> Tensor:
    """Lay the gradients of q, k, v one after the other for each rank; the list is emptied.

    Shapes: (B, h, S, D), (B, k, T, D) twice -> flat, an equal part for each of `size` ranks.
    """
    dq, dk, dv = grads
    grads.clear()
    q_parts = dq.permute(2, 0, 1, 3).chunk(size)
    kv_parts = torch.cat([dk, dv], 1).permute(2, 0, 1, 3).chunk(size)
    return torch.cat([part.reshape(-1) for pair in zip(q_parts, kv_parts, strict=True) for part in pair])


def cross_counts(split: HeadSplit, batch: int, queries: int, keys: int, dim: int) -> list[int]:
    """Return the elements of the gradients that come home from each rank, for tokens of the whole ring rank."""
    return [
        batch
        * dim
        * (queries // split.size * _length(split.queries(u)) + keys // split.size * 2 * _length(split.keys(u)))
        for u in range(split.size)
    ]


def lay_cross_gradients(
    received: Tensor, split: HeadSplit, *, batch: int, queries: int, keys: int, dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv of this rank's tokens; those of a key-value head that several ranks used add up, in float32 or more.

    Args:
        received: flat, from each rank its `cross_counts`.
        split: which heads each rank has.
        batch: rows.
        queries: tokens of the whole ring rank.
        keys: likewise, of the other sequence.
        dim: of a head.

    Shapes: flat -> (B, H, s, D), (B, K, t, D) twice.
    """
    s, t = queries // split.size, keys // split.size
    whole_q = received.new_empty(batch, s, split.num_heads, dim)
    whole_kv = received.new_zeros((2, batch, t, split.num_kv_heads, dim), dtype=accumulator_dtype(received.dtype))
    parts = received.split_with_sizes(cross_counts(split, batch, queries, keys, dim))
    for rank, part in enumerate(parts):
        heads, kv_heads = split.queries(rank), split.keys(rank)
        size = s * batch * _length(heads) * dim
        whole_q[:, :, slice(*heads)] = part[:size].view(s, batch, -1, dim).transpose(0, 1)
        pair = part[size:].view(t, batch, 2, _length(kv_heads), dim).permute(2, 1, 0, 3, 4)
        whole_kv[:, :, :, slice(*kv_heads)] += pair
    dk, dv = whole_kv.to(received.dtype).transpose(2, 3).unbind(0)
    return whole_q.transpose(1, 2), dk, dv


def _length(bounds: Range) -> int:
    return bounds[1] - bounds[0]


def _size(shape: tuple[int, ...]) -> int:
    return math.prod(shape)
