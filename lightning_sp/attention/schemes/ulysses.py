"""Ulysses: an all-to-all trades tokens for heads before the attention, and back after it.

    before:  every rank has s tokens of all H heads            q_BsHD
    after:   every rank has all S = U s tokens of its h heads  q_BShD

Query heads are split as evenly as they go (6 over 4 = 2, 2, 1, 1). A key-value head travels once to each rank whose query heads need
it, never once per query head. Buffers are token-major (S, B, heads, D), so that tokens that arrive are in order and need no copy; heads that
arrive lie beside each other in memory and not in the tensor, so that coming back costs one:

                    copies before                           copies after
    q, k, v         each element once                       none: q, k and v are views
    out             none at B = 1, else each element once   each element once
    grad of out     each element once                       none: a view
    dq, dk, dv      each element once                       each element once; heads that several ranks used are summed

Communicates, sent by rank r of U whose h_r query heads need k_r key-value heads, in elements, one all-to-all each:

    forward   q, k, v:     B s D x sum over u != r of (h_u + 2 k_u)      out:         B s D (U-1) h_r
    backward  grad of out: B s D x sum over u != r of h_u                dq, dk, dv:  B s D (U-1) (h_r + 2 k_r)

Without GQA that is 4 (U-1)/U local tensors of B s H D forward, and as many backward.
Source: DeepSpeed-Ulysses, arXiv:2309.14509, section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_sp import comm
from lightning_sp.attention.kernels.merge import HeadGroup
from lightning_sp.attention.plan.intervals import Range
from lightning_sp.comm.collectives import exchange


@dataclass(frozen=True)
class HeadSplit:
    """Which heads each Ulysses rank has: pure functions of (H, K, U).

    Args:
        num_heads: H, query heads.
        num_kv_heads: K, key-value heads; H must be a multiple of K.
        size: U, Ulysses ranks; at most H.
    """

    num_heads: int
    num_kv_heads: int
    size: int

    def queries(self, rank: int) -> Range:
        """Return the query heads of a rank: an even split, the first ranks holding one more."""
        base, more = divmod(self.num_heads, self.size)
        start = rank * base + min(rank, more)
        return (start, start + base + (rank < more))

    def keys(self, rank: int) -> Range:
        """Return the key-value heads that a rank's query heads need."""
        start, end = self.queries(rank)
        shared = self.num_heads // self.num_kv_heads
        return (start // shared, (end - 1) // shared + 1)

    def width(self, rank: int) -> int:
        """Return how many heads of q, k and v together travel to a rank, per token."""
        return _length(self.queries(rank)) + 2 * _length(self.keys(rank))

    def head_groups(self, rank: int) -> tuple[HeadGroup, ...]:
        """Return the rank's heads in groups, each with the same number of query heads per key-value head, in local numbers."""
        start, end = self.queries(rank)
        first_kv, last_kv = self.keys(rank)
        shared = self.num_heads // self.num_kv_heads
        groups: list[HeadGroup] = []
        for kv in range(first_kv, last_kv):
            low, high = max(start, kv * shared) - start, min(end, (kv + 1) * shared) - start
            previous = groups[-1] if groups else None
            if previous and _length(previous.queries) == (high - low) * _length(previous.keys):
                groups[-1] = HeadGroup((previous.queries[0], high), (previous.keys[0], kv + 1 - first_kv))
            else:
                groups.append(HeadGroup((low, high), (kv - first_kv, kv + 1 - first_kv)))
        return tuple(groups)


@dataclass(frozen=True, kw_only=True)
class Ulysses:
    """One rank's view of the ranks that exchange heads; without a group, of itself alone."""

    split: HeadSplit
    group: ProcessGroup | None
    rank: int

    @classmethod
    def of(cls, group_name: str, num_heads: int, num_kv_heads: int) -> Ulysses:
        """Return that of the group of a name; empty for one rank."""
        group = comm.group_by_name(group_name)
        # Under dynamic shapes the numbers of heads are symbols; a model has fixed ones, so specialising on them costs nothing.
        split = HeadSplit(int(num_heads), int(num_kv_heads), comm.size_of(group))
        return cls(split=split, group=group, rank=comm.rank_in(group))

    @property
    def size(self) -> int:
        """Return the ranks that exchange heads."""
        return self.split.size

    @property
    def queries(self) -> Range:
        """Return this rank's query heads."""
        return self.split.queries(self.rank)


def exchange_qkv(q: Tensor, k: Tensor, v: Tensor, split: HeadSplit, rank: int, group: ProcessGroup) -> Tensor:
    """Trade tokens for heads: every rank's tokens of this rank's heads.

    Shapes: q (B, H, s, D), k and v (B, K, s, D) -> (S, B, h + 2 k, D); see `split_qkv`.
    Communicates: one all_to_all_single on the Ulysses axis.
    """
    buffer, counts = _pack([(q, split.queries), (k, split.keys), (v, split.keys)], split.size)
    tokens, batch, dim = q.shape[2], q.shape[0], q.shape[3]
    width = split.width(rank)
    received = exchange(buffer, counts, [tokens * batch * width * dim] * split.size, group)
    return received.view(split.size * tokens, batch, width, dim)


def split_qkv(packed: Tensor, split: HeadSplit, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k, v as views. Shapes: (S, B, h + 2 k, D) -> (B, h, S, D), (B, k, S, D) twice."""
    heads, kv_heads = _length(split.queries(rank)), _length(split.keys(rank))
    q, k, v = packed.permute(1, 2, 0, 3).split_with_sizes([heads, kv_heads, kv_heads], dim=1)
    return q, k, v


def exchange_out(out: Tensor, split: HeadSplit, group: ProcessGroup) -> Tensor:
    """Trade heads for tokens: all heads of this rank's tokens. The mirror of the q part of `exchange_qkv`.

    Shapes: (B, h, S, D) -> (B, H, s, D). Communicates: one all_to_all_single on the Ulysses axis.
    """
    widths = [_length(split.queries(u)) for u in range(split.size)]
    received = _exchange_back(out.permute(2, 0, 1, 3), widths, group)
    return _side_by_side(
        _parts(received, widths, out.shape[0], out.shape[3]), [split.queries(u) for u in range(split.size)]
    )


def exchange_out_grad(grad: Tensor, split: HeadSplit, rank: int, group: ProcessGroup) -> Tensor:
    """Trade tokens for heads for the gradient of out.

    Shapes: (B, H, s, D) -> (B, h, S, D), a view of token-major memory. Communicates: one all_to_all_single on the Ulysses axis.
    """
    buffer, counts = _pack([(grad, split.queries)], split.size)
    batch, _, tokens, dim = grad.shape
    heads = _length(split.queries(rank))
    received = exchange(buffer, counts, [tokens * batch * heads * dim] * split.size, group)
    return received.view(split.size * tokens, batch, heads, dim).permute(1, 2, 0, 3)


def pack_gradients(grads: list[Tensor]) -> Tensor:
    """Lay the gradients of q, k, v side by side, as `exchange_qkv` left q, k, v; the list is emptied.

    Shapes: (B, h, S, D), (B, k, S, D) twice -> (S, B, h + 2 k, D).
    """
    packed = torch.cat([t.permute(2, 0, 1, 3) for t in grads], 2)
    grads.clear()
    return packed


def gradient_counts(split: HeadSplit, batch: int, tokens: int, dim: int) -> list[int]:
    """Return the elements of the gradients that come home from each rank, for `tokens` of the whole ring rank."""
    return [tokens // split.size * batch * dim * split.width(u) for u in range(split.size)]


def exchange_gradients(packed: Tensor, received: Sequence[int], group: ProcessGroup) -> Tensor:
    """Send the packed gradients home. The mirror of `exchange_qkv`.

    Shapes: (S, B, h + 2 k, D) -> flat, from each rank u (s, B, h_u + 2 k_u, D), `gradient_counts`; see `lay_gradients`.
    Communicates: one all_to_all_single on the Ulysses axis.
    """
    flat = packed.contiguous().view(-1)
    return exchange(flat, [flat.numel() // len(received)] * len(received), received, group)


def lay_gradients(received: Tensor, split: HeadSplit, batch: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv of this rank's tokens; those of a key-value head that several ranks used are summed.

    Shapes: flat, as `exchange_gradients` returns it -> (B, H, s, D), (B, K, s, D) twice.
    """
    queries, keys = ([heads_of(u) for u in range(split.size)] for heads_of in (split.queries, split.keys))
    per_rank = [
        part.split_with_sizes([_length(own_q), _length(own_kv), _length(own_kv)], dim=2)
        for part, own_q, own_kv in zip(
            _parts(received, [split.width(u) for u in range(split.size)], batch, dim), queries, keys, strict=True
        )
    ]
    dq, dk, dv = (
        _side_by_side(own, heads) for own, heads in zip(zip(*per_rank, strict=True), (queries, keys, keys), strict=True)
    )
    return dq, dk, dv


def _pack(tensors: Sequence[tuple[Tensor, Callable[[int], Range]]], size: int) -> tuple[Tensor, list[int]]:
    """Return one flat buffer, destination by destination, each token-major, and each destination's element count."""
    batch, _, tokens, dim = tensors[0][0].shape
    ranges = [[heads_of(u) for _, heads_of in tensors] for u in range(size)]
    widths = [sum(_length(r) for r in row) for row in ranges]
    counts = [tokens * batch * width * dim for width in widths]
    buffer = tensors[0][0].new_empty(sum(counts))
    for piece, row, width in zip(buffer.split_with_sizes(counts), ranges, widths, strict=True):
        view = piece.view(tokens, batch, width, dim)
        offset = 0
        for (tensor, _), (start, end) in zip(tensors, row, strict=True):
            view[:, :, offset : offset + end - start] = tensor[:, start:end].permute(2, 0, 1, 3)
            offset += end - start
    return buffer, counts


def _exchange_back(packed: Tensor, widths: Sequence[int], group: ProcessGroup) -> Tensor:
    """Send each rank its tokens of this rank's heads.

    Shapes: (S, B, w, D) -> flat, from each rank u (s, B, w_u, D); see `_parts`.
    """
    flat = packed.contiguous().view(-1)
    tokens_elements = packed.shape[0] // len(widths) * packed.shape[1] * packed.shape[3]
    return exchange(flat, [flat.numel() // len(widths)] * len(widths), [tokens_elements * w for w in widths], group)


def _parts(received: Tensor, widths: Sequence[int], batch: int, dim: int) -> list[Tensor]:
    """Return what came from each rank, as views. Shapes: flat -> per rank u (s, B, w_u, D)."""
    tokens = received.numel() // (batch * dim * sum(widths))
    return [
        part.view(tokens, batch, width, dim)
        for part, width in zip(
            received.split_with_sizes([tokens * batch * dim * width for width in widths]), widths, strict=True
        )
    ]


def _side_by_side(parts: Sequence[Tensor], heads: Sequence[Range]) -> Tensor:
    """Lay the heads of all ranks beside each other in token-major memory, each element copied once; what several ranks had is summed.

    Shapes: per rank u (s, B, w_u, D), `heads[u]` of H -> (B, H, s, D).
    """
    tokens, batch, _, dim = parts[0].shape
    edges = sorted({edge for bounds in heads for edge in bounds})
    whole = parts[0].new_empty(batch, tokens, edges[-1], dim)
    for start, end in pairwise(edges):
        shares = [
            part[:, :, start - low : end - low].transpose(0, 1)
            for part, (low, high) in zip(parts, heads, strict=True)
            if low <= start and end <= high
        ]
        if len(shares) == 1:
            whole[:, :, start:end] = shares[0]
        else:
            # In one call: it adds bfloat16 in float32 and rounds once, without float32 copies of the shares.
            torch.sum(torch.stack(shares), 0, out=whole[:, :, start:end])
    return whole.transpose(1, 2)


def _length(bounds: Range) -> int:
    return bounds[1] - bounds[0]
