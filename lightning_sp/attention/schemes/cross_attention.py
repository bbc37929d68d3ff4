"""Ulysses where queries and keys are of two sequences (cross attention): as `ulysses`, with as many tokens of keys as there are.

A message holds, for each destination, this rank's query tokens of its heads and then the key tokens: still one all-to-all a way.

Communicates, sent by rank r of U whose h_r query heads need k_r key-value heads, s query and t key tokens a rank, in elements:

    forward   q, k, v:     B D x sum over u != r of (s h_u + 2 t k_u)      backward  dq, dk, dv:  B D (U-1) (s h_r + 2 t k_r)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_sp.attention.schemes.head_split import HeadSplit, length
from lightning_sp.attention.schemes.ulysses import lay_side_by_side
from lightning_sp.comm.collectives import Exchange


def start_cross(q: Tensor, k: Tensor, v: Tensor, split: HeadSplit, rank: int, group: ProcessGroup) -> Exchange:
    """Begin to trade tokens for heads: every rank's tokens of this rank's heads.

    Shapes: q (B, H, s, D), k and v (B, K, t, D) -> flat, see `lay_cross`.
    Communicates: one all_to_all_single on the Ulysses axis.
    """
    parts = []
    for each in range(split.size):
        heads, keys = slice(*split.queries(each)), slice(*split.travelling(each))
        parts.append(q[:, heads].permute(2, 0, 1, 3).reshape(-1))
        parts.append(torch.cat([k[:, keys], v[:, keys]], 1).permute(2, 0, 1, 3).reshape(-1))
    sent = [parts[2 * each].numel() + parts[2 * each + 1].numel() for each in range(split.size)]
    batch, dim = q.shape[0], q.shape[3]
    rows = q.shape[2] * length(split.queries(rank)) + k.shape[2] * 2 * length(split.travelling(rank))
    return Exchange(torch.cat(parts), sent, [batch * dim * rows] * split.size, group)


def lay_cross(received: Tensor, size: int, packed_q: Tensor, packed_kv: Tensor) -> None:
    """Lay what arrived, from each rank its queries and then its keys and values, where it stays. See `split_cross`.

    Shapes: flat; packed_q (U s, B, h, D), packed_kv (U t, B, 2 k, D).
    """
    pieces = received.split_with_sizes([packed_q.numel() // size, packed_kv.numel() // size] * size)
    for whole, parts in ((packed_q, pieces[::2]), (packed_kv, pieces[1::2])):
        torch.cat(parts, out=whole.view(-1))


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
    s, t = queries // split.size, keys // split.size
    heads, kv_heads = ([length(of(u)) for u in range(split.size)] for of in (split.queries, split.travelling))
    return [batch * dim * (s * own + 2 * t * own_kv) for own, own_kv in zip(heads, kv_heads, strict=True)]


def lay_cross_gradients(received: Tensor, split: HeadSplit, whole: Sequence[Tensor]) -> None:
    """Lay dq, dk, dv of this rank's tokens where they belong; those of a key-value head that several ranks used are summed.

    Shapes: flat, from each rank its `cross_counts`; whole: (B, H, s, D), (B, K, t, D) twice.
    """
    batch, _, s, dim = whole[0].shape
    t = whole[1].shape[2]
    queries, keys = ([heads_of(u) for u in range(split.size)] for heads_of in (split.queries, split.travelling))
    shapes = [
        shape
        for u in range(split.size)
        for shape in ((s, batch, length(queries[u]), dim), (t, batch, 2 * length(keys[u]), dim))
    ]
    pieces = received.split_with_sizes([math.prod(shape) for shape in shapes])
    parts = [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]
    lay_side_by_side(parts[::2], queries, whole[0])
    for number, each in enumerate(whole[1:]):
        lay_side_by_side([part.chunk(2, 2)[number] for part in parts[1::2]], keys, each)
