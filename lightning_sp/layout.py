"""Which global positions a rank owns: pure functions of (layout, rank). No process, no collective.

A sequence of S tokens is cut in 2R chunks for a ring of R. Ring rank r holds chunks r and 2R-1-r ("zigzag"), so every rank has the
same number of causal (query, key) pairs. Within a ring rank the U Ulysses ranks hold contiguous pieces of those tokens, in order:

    S = 16, R = 2, U = 2       chunk:   0 0 0 0   1 1 1 1   2 2 2 2   3 3 3 3
                               ring 0:  0 0 0 0                       3 3 3 3     ulysses 0: first half, 1: second half
                               ring 1:            1 1 1 1   2 2 2 2

With R = 1 the zigzag vanishes and the shards are contiguous. Source: zhuzilin/ring-flash-attention (zigzag), USP, arXiv:2405.07719, section 4.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

Range = tuple[int, int]  # [start, end)


@dataclass(frozen=True)
class SequenceLayout:
    """How sequences are split over ring x ulysses ranks.

    Args:
        ring_size: R, ranks of the ring axis.
        ulysses_size: U, ranks of the Ulysses axis.
    """

    ring_size: int = 1
    ulysses_size: int = 1

    @property
    def size(self) -> int:
        """Ranks that share one sequence, R x U."""
        return self.ring_size * self.ulysses_size

    @property
    def multiple(self) -> int:
        """The length of a sequence must be a multiple of this, in tokens."""
        if self.ring_size == 1:
            return self.ulysses_size
        # 2R equal chunks, and the two chunks of a ring rank divide by U.
        return math.lcm(2 * self.ring_size, self.ring_size * self.ulysses_size)

    def padded_length(self, length: int) -> int:
        """Return the smallest length that the degrees divide, at least `length` tokens."""
        return -(-length // self.multiple) * self.multiple

    def coordinates(self, rank: int) -> tuple[int, int]:
        """Return (ring rank, Ulysses rank) of a rank within the sequence-parallel group: Ulysses is the faster axis."""
        return divmod(rank, self.ulysses_size)

    def ring_chunks(self, length: int, ring_rank: int) -> tuple[tuple[int, int], ...]:
        """Return the global [start, end) ranges that a ring rank holds after the Ulysses exchange, in local order."""
        self._check(length)
        if self.ring_size == 1:
            return ((0, length),)
        chunk = length // (2 * self.ring_size)
        late = 2 * self.ring_size - 1 - ring_rank
        return ((ring_rank * chunk, (ring_rank + 1) * chunk), (late * chunk, (late + 1) * chunk))

    def ranges(self, length: int, rank: int) -> tuple[tuple[int, int], ...]:
        """Return the global [start, end) ranges that a rank owns, in local order; none is empty unless length is 0."""
        ring_rank, ulysses_rank = self.coordinates(rank)
        local = length // self.size
        low, high = ulysses_rank * local, (ulysses_rank + 1) * local
        owned = []
        offset = 0
        for start, end in self.ring_chunks(length, ring_rank):
            first, last = max(low, offset), min(high, offset + end - start)
            if first < last:
                owned.append((start + first - offset, start + last - offset))
            offset += end - start
        return tuple(owned)

    def _check(self, length: int) -> None:
        assert length % self.multiple == 0, f"length {length} is no multiple of {self.multiple}: pad it first"


def positions(layout: SequenceLayout, length: int, rank: int) -> Tensor:
    """Return the global positions of a rank's tokens.

    Shapes: () -> (length / layout.size,), int64.
    """
    return torch.cat([torch.arange(start, end) for start, end in layout.ranges(length, rank)] or [torch.arange(0)])


def shard(tensor: Tensor, layout: SequenceLayout, rank: int, *, dim: int) -> Tensor:
    """Return a rank's part of a whole tensor, contiguous.

    Shapes: (..., S, ...) -> (..., S / layout.size, ...) along `dim`. Communicates: nothing.
    """
    parts = [tensor.narrow(dim, start, end - start) for start, end in layout.ranges(tensor.shape[dim], rank)]
    return torch.cat(parts, dim) if len(parts) > 1 else parts[0].contiguous()


def merge(shards: list[Tensor], layout: SequenceLayout, *, dim: int) -> Tensor:
    """Return the whole tensor from the shards of all ranks, in rank order: the inverse of `shard`.

    Shapes: layout.size x (..., s, ...) -> (..., s * layout.size, ...) along `dim`. Communicates: nothing.
    """
    length = shards[0].shape[dim] * layout.size
    pieces: list[tuple[int, Tensor]] = []
    for rank, local in enumerate(shards):
        offset = 0
        for start, end in layout.ranges(length, rank):
            pieces.append((start, local.narrow(dim, offset, end - start)))
            offset += end - start
    pieces.sort(key=lambda piece: piece[0])
    return torch.cat([tensor for _, tensor in pieces], dim)


def pad(tensor: Tensor, length: int, *, dim: int, value: float | int) -> Tensor:
    """Return the tensor with `value` appended along `dim` up to `length` tokens; the tensor itself where none are missing."""
    missing = length - tensor.shape[dim]
    if missing == 0:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = missing
    return torch.cat([tensor, tensor.new_full(shape, value)], dim)
