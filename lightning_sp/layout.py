"""Which global positions a rank owns: pure functions of (layout, rank). No process, no collective.

A sequence of S tokens is cut in 2R chunks for a ring of R. Ring rank r owns chunks r and 2R-1-r ("zigzag"), so every rank has the
same number of causal (query, key) pairs. Within a ring rank the U Ulysses ranks own contiguous pieces of those tokens, in order:

    S = 16, R = 2, U = 2       chunk:   0 0 0 0   1 1 1 1   2 2 2 2   3 3 3 3
                               ring 0:  0 0 0 0                       3 3 3 3     ulysses 0: first half, 1: second half
                               ring 1:            1 1 1 1   2 2 2 2

With R = 1 the zigzag vanishes and the shards are contiguous. A layout may also name the ranges of each ring rank, equally many tokens on
each, for the documents of one batch (`attention/plan/balance.py`).
Source: zhuzilin/ring-flash-attention (zigzag), USP, arXiv:2405.07719, section 4.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from lightning_sp.errors import SequenceParallelError

Range = tuple[int, int]  # [start, end)
Ranges = tuple[Range, ...]


@dataclass(frozen=True)
class SequenceLayout:
    """How sequences are split over ring x ulysses ranks.

    Args:
        ring_size: R, ranks of the ring axis.
        ulysses_size: U, ranks of the Ulysses axis.
        assignment: the global ranges [start, end) of each ring rank, for sequences of one length; empty for zigzag, of any length.

    Raises:
        SequenceParallelError: an assignment that does not give every token to one ring rank, and equally many to each.
    """

    ring_size: int = 1
    ulysses_size: int = 1
    assignment: tuple[Ranges, ...] = ()
    # The same as (ring rank, start, end) rows, made once: integers that change from batch to batch would make torch.compile compile for each.
    table: Tensor | None = field(init=False, compare=False, repr=False, default=None)
    _assigned: int | None = field(init=False, compare=False, repr=False, default=None)

    def __post_init__(self) -> None:
        if self.assignment:
            self._check_assignment()
            object.__setattr__(
                self, "_assigned", sum(end - start for ranges in self.assignment for start, end in ranges)
            )
            rows = [(rank, start, end) for rank, ranges in enumerate(self.assignment) for start, end in ranges]
            object.__setattr__(self, "table", torch.tensor(rows, dtype=torch.int64))

    @classmethod
    def from_table(cls, ring_size: int, ulysses_size: int, table: Tensor | None) -> SequenceLayout:
        """Return the layout of a `table`: None is zigzag's."""
        if table is None:
            return cls(ring_size, ulysses_size)
        return _from_table(ring_size, ulysses_size, table.numpy().tobytes())

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
        """Return the global [start, end) ranges of a ring rank after the Ulysses exchange, in local order."""
        self._check(length)
        if self.assignment:
            return self.assignment[ring_rank]
        if self.ring_size == 1:
            return ((0, length),)
        chunk = length // (2 * self.ring_size)
        mirror = 2 * self.ring_size - 1 - ring_rank
        return ((ring_rank * chunk, (ring_rank + 1) * chunk), (mirror * chunk, (mirror + 1) * chunk))

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

    def for_length(self, length: int) -> SequenceLayout:
        """Return this layout, or zigzag's for sequences of another length than that of the assignment."""
        return self if self._assigned in (None, length) else SequenceLayout(self.ring_size, self.ulysses_size)

    def _check(self, length: int) -> None:
        self.check_length(length)
        assert length % self.multiple == 0, f"length {length} is no multiple of {self.multiple}: pad it first"

    def check_length(self, length: int) -> None:
        """Refuse sequences of another length than that of the assignment.

        Raises:
            SequenceParallelError: the lengths differ.
        """
        if self._assigned not in (None, length):
            raise SequenceParallelError(
                f"a sequence of {length} tokens in a layout made for a batch of {self._assigned} (padding included): the two must be equal; "
                "use the layout of the batch that the tensor belongs to, or SequenceLayout(ring_size, ulysses_size) on all sides"
            )

    def _check_assignment(self) -> None:
        ranges = sorted(each for own in self.assignment for each in own)
        tokens = [sum(end - start for start, end in own) for own in self.assignment]
        given = f"an assignment of {tokens} tokens to {len(self.assignment)} ring ranks"
        if len(self.assignment) != self.ring_size or len(set(tokens)) != 1 or sum(tokens) % self.multiple:
            raise SequenceParallelError(
                f"{given}, for ring {self.ring_size} x ulysses {self.ulysses_size}: must be equally many for each of {self.ring_size}, "
                f"and in all a multiple of {self.multiple}; pad the sequence, or share its tokens out equally"
            )
        if any(list(own) != sorted(own) for own in self.assignment):
            raise SequenceParallelError(f"{given}: the ranges of a ring rank must rise; sort them by their start")
        starts, ends = [0, *(end for _, end in ranges)], [*(start for start, _ in ranges), sum(tokens)]
        fault = next((edges for edges in zip(starts, ends, strict=True) if edges[0] != edges[1]), None)
        if fault is not None or any(start >= end for start, end in ranges):
            at = f"a range ends at {fault[0]} and the next begins at {fault[1]}" if fault else "a range is empty"
            raise SequenceParallelError(
                f"{given}: {at}; every token must be in one range: begin each where the one before ends"
            )


@lru_cache(maxsize=32)
def _from_table(ring_size: int, ulysses_size: int, rows: bytes) -> SequenceLayout:
    """Cached: all layers of a step read the same table."""
    table = torch.frombuffer(bytearray(rows), dtype=torch.int64).view(-1, 3).tolist()
    assignment = tuple(tuple((start, end) for owner, start, end in table if owner == rank) for rank in range(ring_size))
    return SequenceLayout(ring_size, ulysses_size, assignment)


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
