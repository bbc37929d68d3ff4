"""Ulysses: an all-to-all trades tokens for heads before the attention, and back after it.

    before:  every rank has s tokens of all H heads            q_BsHD
    after:   every rank has all S = U s tokens of its h heads  q_BShD

Query heads are split as evenly as they go (6 over 4 = 2, 2, 1, 1). A key-value head travels once to each rank whose query heads need
it, never once per query head. Each function here is of one exchange: of all of a rank's heads, or of a stage of them (`stages`).

Buffers are token-major (S, B, heads, D), so that tokens that arrive are in order and need no copy; heads that arrive lie beside each other in
memory and not in the tensor, so that coming back costs one:

                    copies before                           copies after
    q, k, v         each element once                       none: q, k and v are views
    out             at most each element once               each element once
    grad of out     each element once                       none: a view
    dq, dk, dv      each element once                       each element once; heads that several ranks used are summed

Where all ranks have as many heads (`even_heads`), one copy or sum moves those of all ranks: a GPU starts 3 kernels to pack q, k and v, not 3 U.

Communicates, sent by rank r of U whose h_r query heads need k_r key-value heads, in elements, one all-to-all each:

    forward   q, k, v:     B s D x sum over u != r of (h_u + 2 k_u)      out:         B s D (U-1) h_r
    backward  grad of out: B s D x sum over u != r of h_u                dq, dk, dv:  B s D (U-1) (h_r + 2 k_r)
              delta:       B s x sum over u != r of h_u, of the accumulator's dtype (`kernels.out_gradient`)

Without GQA that is 4 (U-1)/U local tensors of B s H D forward, and as many and delta's 1/D of one (2/D in 16 bits) backward. For delta, out of
the heads is not saved beside that of the tokens.
Source: DeepSpeed-Ulysses, arXiv:2309.14509, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_sp import comm
from lightning_sp.attention.plan.intervals import Range
from lightning_sp.attention.schemes.even_heads import EvenHeads, even_heads
from lightning_sp.attention.schemes.head_split import HeadSplit, head_split, length
from lightning_sp.comm.collectives import Exchange, exchange


@dataclass(frozen=True, kw_only=True)
class Ulysses:
    """One rank's view of the ranks that exchange heads; without a group, of itself alone."""

    split: HeadSplit
    group: ProcessGroup | None
    rank: int

    @classmethod
    def of(cls, group_name: str, num_heads: int, num_kv_heads: int, num_stages: int) -> Ulysses:
        """Return that of the group of a name; empty for one rank, which exchanges nothing and so has no stages."""
        group = comm.group_by_name(group_name)
        # Under dynamic shapes the numbers of heads are symbols; a model has fixed ones, so specialising on them costs nothing.
        size = comm.size_of(group)
        split = head_split(int(num_heads), int(num_kv_heads), size, num_stages if size > 1 else 1)
        return cls(split=split, group=group, rank=comm.rank_in(group))

    @property
    def size(self) -> int:
        """Return the ranks that exchange heads."""
        return self.split.size

    @property
    def queries(self) -> Range:
        """Return this rank's query heads."""
        return self.split.queries(self.rank)

    @property
    def keys(self) -> Range:
        """Return the key-value heads that they need."""
        return self.split.keys(self.rank)


def start_qkv(
    q: Tensor, k: Tensor, v: Tensor, split: HeadSplit, rank: int, group: ProcessGroup, arriving: Tensor
) -> Exchange:
    """Begin to trade tokens for heads: every rank's tokens of this rank's heads.

    Shapes: q (B, H, s, D), k and v (B, K, s, D); arriving, where they land: (S, B, h + 2 k, D), see `split_qkv`.
    Communicates: one all_to_all_single on the Ulysses axis.
    """
    buffer, counts = _pack([q, k, v], [split.all_queries(), split.all_travelling(), split.all_travelling()])
    return Exchange(buffer, counts, [arriving.numel() // split.size] * split.size, group, arriving.view(-1))


def split_qkv(packed: Tensor, split: HeadSplit, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k, v as views. Shapes: (S, B, h + 2 k, D) -> (B, h, S, D), (B, k, S, D) twice."""
    heads, kv_heads = length(split.queries(rank)), length(split.travelling(rank))
    q, k, v = packed.permute(1, 2, 0, 3).split_with_sizes([heads, kv_heads, kv_heads], dim=1)
    return q, k, v


def start_out(heads_out: Tensor, split: HeadSplit, group: ProcessGroup) -> Exchange:
    """Begin to trade heads for tokens. The mirror of the q part of `start_qkv`.

    Shapes: (S, B, h, D), contiguous -> flat, from each rank u (s, B, h_u, D); see `lay_out`.
    Communicates: one all_to_all_single on the Ulysses axis.
    """
    tokens, batch, heads, dim = heads_out.shape
    s = tokens // split.size
    received = [s * batch * dim * length(own) for own in split.all_queries()]
    return Exchange(heads_out.view(-1), [s * batch * heads * dim] * split.size, received, group)


def lay_out(received: Tensor, split: HeadSplit, out: Tensor) -> None:
    """Lay what came home where it belongs. Shapes: flat, see `start_out`; out (B, H, s, D)."""
    _lay(received, [split.all_queries()], [out])


def start_out_grad(grad: Tensor, split: HeadSplit, rank: int, group: ProcessGroup) -> Exchange:
    """Begin to trade tokens for heads for the gradient of out.

    Shapes: (B, H, s, D) -> flat, (S, B, h, D). Communicates: one all_to_all_single on the Ulysses axis.
    """
    buffer, counts = _pack([grad], [split.all_queries()])
    batch, _, tokens, dim = grad.shape
    return Exchange(buffer, counts, [tokens * batch * length(split.queries(rank)) * dim] * split.size, group)


def pack_gradients(grads: list[Tensor]) -> Tensor:
    """Lay the gradients of q, k, v side by side, as `start_qkv` left q, k, v; the list is emptied.

    Shapes: (B, h, S, D), (B, k, S, D) twice -> (S, B, h + 2 k, D).
    """
    packed = torch.cat([t.permute(2, 0, 1, 3) for t in grads], 2)
    grads.clear()
    return packed


def gradient_counts(split: HeadSplit, batch: int, tokens: int, dim: int) -> list[int]:
    """Return the elements of the gradients that come home from each rank, for `tokens` of the whole ring rank."""
    return [tokens // split.size * batch * dim * split.width(u) for u in range(split.size)]


def exchange_gradients(packed: Tensor, received: Sequence[int], group: ProcessGroup) -> Tensor:
    """Send the packed gradients home. The mirror of `start_qkv`.

    Shapes: (S, B, h + 2 k, D) -> flat, from each rank u (s, B, h_u + 2 k_u, D), `gradient_counts`; see `lay_gradients`.
    Communicates: one all_to_all_single on the Ulysses axis.
    """
    flat = packed.contiguous().view(-1)
    return exchange(flat, [flat.numel() // len(received)] * len(received), received, group)


def lay_gradients(received: Tensor, split: HeadSplit, whole: Sequence[Tensor]) -> None:
    """Lay dq, dk, dv of this rank's tokens where they belong; those of a key-value head that several ranks used are summed.

    Shapes: flat, as `exchange_gradients` returns it; whole: (B, H, s, D), (B, K, s, D) twice.
    """
    _lay(received, [split.all_queries(), split.all_travelling(), split.all_travelling()], whole)


def lay_side_by_side(parts: Sequence[Tensor], heads: Sequence[Range], whole: Tensor) -> None:
    """Lay the heads of all ranks beside each other, each element copied once; what several ranks had is summed.

    Shapes: per rank u (s, B, w_u, D), `heads[u]` of H; whole (B, H, s, D).
    """
    token_major = whole.transpose(1, 2)  # as it lies in memory
    for start, end in pairwise(sorted({edge for bounds in heads for edge in bounds})):
        shares = [
            part[:, :, start - low : end - low].transpose(0, 1)
            for part, (low, high) in zip(parts, heads, strict=True)
            if low <= start and end <= high
        ]
        if len(shares) == 1:
            token_major[:, :, start:end] = shares[0]
        elif shares:
            _sum(torch.stack(shares), 0, token_major[:, :, start:end])


def _pack(tensors: Sequence[Tensor], heads: Sequence[tuple[Range, ...]]) -> tuple[Tensor, list[int]]:
    """Return one flat buffer, destination by destination, each token-major, and each destination's element count."""
    batch, _, tokens, dim = tensors[0].shape
    widths = _widths(tuple(heads))
    counts = [tokens * batch * width * dim for width in widths]
    buffer = tensors[0].new_empty(sum(counts))
    if even := _even(heads, tensors):
        places = buffer.view(len(widths), tokens, batch, widths[0], dim).split_with_sizes(
            [each.width for each in even], 3
        )
        for place, tensor, each in zip(places, tensors, even, strict=True):
            if each.width:
                each.shared(place).copy_(each.rank_major(tensor)[:, None])
        return buffer, counts
    for rank, place in enumerate(_parts(buffer, widths, batch, dim)):
        for part, tensor, ranges in zip(
            place.split_with_sizes([length(each[rank]) for each in heads], 2), tensors, heads, strict=True
        ):
            part.copy_(tensor[:, slice(*ranges[rank])].permute(2, 0, 1, 3))
    return buffer, counts


def _lay(received: Tensor, heads: Sequence[tuple[Range, ...]], whole: Sequence[Tensor]) -> None:
    """Lay the heads of each tensor that came from all ranks where they belong. The mirror of `_pack`.

    Shapes: flat, from each rank u (s, B, sum of its heads, D); whole (B, H, s, D) each.
    """
    batch, _, tokens, dim = whole[0].shape
    widths = _widths(tuple(heads))
    if even := _even(heads, whole):
        parts = received.view(len(widths), tokens, batch, widths[0], dim).split_with_sizes(
            [each.width for each in even], 3
        )
        for part, each, into in zip(parts, even, whole, strict=True):
            if each.sharing == 1:
                each.rank_major(into).copy_(part)
            elif each.width:
                _sum(each.shared(part), 1, each.rank_major(into))
        return
    per_rank = [
        part.split_with_sizes([length(each[rank]) for each in heads], 2)
        for rank, part in enumerate(_parts(received, widths, batch, dim))
    ]
    for parts, ranges, into in zip(zip(*per_rank, strict=True), heads, whole, strict=True):
        lay_side_by_side(parts, ranges, into)


@lru_cache(maxsize=4096)
def _widths(heads: tuple[tuple[Range, ...], ...]) -> list[int]:
    """Return the heads of each rank in all tensors together."""
    return [sum(length(own) for own in of_a_rank) for of_a_rank in zip(*heads, strict=True)]


def _even(heads: Sequence[tuple[Range, ...]], tensors: Sequence[Tensor]) -> list[EvenHeads]:
    """Return each tensor's heads as equal steps; empty where those of one are none."""
    # A model has fixed numbers of heads: to specialise on them costs nothing under dynamic shapes.
    found = [even_heads(ranges, int(each.shape[1])) for ranges, each in zip(heads, tensors, strict=True)]
    return [] if None in found else [each for each in found if each]


def _sum(shares: Tensor, dim: int, out: Tensor) -> None:
    """Sum over a dim. In one call: it adds bfloat16 in float32 and rounds once, without float32 copies of the shares."""
    torch.sum(shares, dim, out=out)


def _parts(received: Tensor, widths: Sequence[int], batch: int, dim: int) -> list[Tensor]:
    """Return what came from each rank, as views. Shapes: flat -> per rank u (s, B, w_u, D)."""
    tokens = received.numel() // (batch * dim * sum(widths))
    return [
        part.view(tokens, batch, width, dim)
        for part, width in zip(
            received.split_with_sizes([tokens * batch * dim * width for width in widths]), widths, strict=True
        )
    ]
