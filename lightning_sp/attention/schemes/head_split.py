"""Which heads each Ulysses rank has, in all or in some stages: index arithmetic, without a process.

A rank's query heads go in stages of equally many. Stages that share a key-value head follow each other and make one pass round the ring:
its key-value heads travel in its first stage, once. Of 8 query heads that share 2 key-value heads, on 2 ranks in 4 stages:

    stage              0            1        2        3
    rank 0      q0 and kv0         q1       q2       q3      one pass, of kv0
    rank 1      q4 and kv1         q5       q6       q7      one pass, of kv1

Where each query head has a key-value head of its own, each stage is a pass.
Source: stages of heads, and keys once for their group, Untied Ulysses, arXiv:2602.21196.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise

from lightning_sp.attention.kernels.merge import HeadGroup
from lightning_sp.attention.plan.intervals import Range

# Every call of every layer asks for the same splits.
_kept = lru_cache(maxsize=4096)


@dataclass(frozen=True)
class HeadSplit:
    """Which heads each Ulysses rank has: pure functions of these numbers, so each answer is kept.

    Args:
        num_heads: H, query heads.
        num_kv_heads: K, key-value heads; H must be a multiple of K.
        size: U, Ulysses ranks; at most H.
        num_stages: above 1 it divides H / U, see `config.check_stages`.
        stages: the stages that are meant; None for all.
    """

    num_heads: int
    num_kv_heads: int
    size: int
    num_stages: int = 1
    stages: Range | None = None

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """What each kept answer is looked up by: dozens of times in a call."""
        return hash((self.num_heads, self.num_kv_heads, self.size, self.num_stages, self.stages))

    @property
    def first_stage(self) -> int:
        """Return the number of the first stage that is meant."""
        return self._meant[0]

    @_kept
    def each_stage(self) -> tuple[HeadSplit, ...]:
        """Return the split of each of the stages that are meant."""
        return tuple(replace(self, stages=(stage, stage + 1)) for stage in range(*self._meant))

    @_kept
    def passes(self) -> tuple[HeadSplit, ...]:
        """Return the splits of all stages that share key-value heads, which go round the ring together."""
        edges = [*(stage for stage in range(self.num_stages) if self._opens(stage)), self.num_stages]
        return tuple(replace(self, stages=edge) for edge in pairwise(edges))

    @_kept
    def all_queries(self) -> tuple[Range, ...]:
        """Return the query heads of each rank."""
        return tuple(self.queries(rank) for rank in range(self.size))

    @_kept
    def all_travelling(self) -> tuple[Range, ...]:
        """Return the key-value heads that travel to each rank."""
        return tuple(self.travelling(rank) for rank in range(self.size))

    @_kept
    def queries(self, rank: int) -> Range:
        """Return the query heads of a rank: an even split, the first ranks holding one more."""
        base, more = divmod(self.num_heads, self.size)
        start, own = rank * base + min(rank, more), base + (rank < more)
        first, last = self._meant
        return (start + first * own // self.num_stages, start + last * own // self.num_stages)

    @_kept
    def keys(self, rank: int) -> Range:
        """Return the key-value heads that a rank's query heads need."""
        start, end = self.queries(rank)
        shared = self.num_heads // self.num_kv_heads
        return (start // shared, (end - 1) // shared + 1)

    @_kept
    def travelling(self, rank: int) -> Range:
        """Return the key-value heads that travel to a rank: those of the passes that begin here."""
        begun = [each for each in self.passes() if each.first_stage in range(*self._meant)]
        return (begun[0].keys(rank)[0], begun[-1].keys(rank)[1]) if begun else (0, 0)

    @_kept
    def width(self, rank: int) -> int:
        """Return how many heads of q, k and v together travel to a rank, per token."""
        return length(self.queries(rank)) + 2 * length(self.travelling(rank))

    @_kept
    def head_groups(self, rank: int) -> tuple[HeadGroup, ...]:
        """Return the rank's heads in groups, each with the same number of query heads per key-value head, in local numbers."""
        start, end = self.queries(rank)
        first_kv, last_kv = self.keys(rank)
        shared = self.num_heads // self.num_kv_heads
        groups: list[HeadGroup] = []
        for kv in range(first_kv, last_kv):
            low, high = max(start, kv * shared) - start, min(end, (kv + 1) * shared) - start
            previous = groups[-1] if groups else None
            if previous and length(previous.queries) == (high - low) * length(previous.keys):
                groups[-1] = HeadGroup((previous.queries[0], high), (previous.keys[0], kv + 1 - first_kv))
            else:
                groups.append(HeadGroup((low, high), (kv - first_kv, kv + 1 - first_kv)))
        return tuple(groups)

    @property
    def _meant(self) -> Range:
        return (0, self.num_stages) if self.stages is None else self.stages

    def _opens(self, stage: int) -> bool:
        """Return whether a stage begins with a key-value head of its own, on every rank: all exchange in one order, so all have equal passes."""
        own, shared = self.num_heads // self.size, self.num_heads // self.num_kv_heads
        return stage == 0 or (own % shared == 0 and own // self.num_stages * stage % shared == 0)


@_kept
def head_split(num_heads: int, num_kv_heads: int, size: int, num_stages: int) -> HeadSplit:
    """Return the split of these numbers, the same one at each call: it knows its answers."""
    return HeadSplit(num_heads, num_kv_heads, size, num_stages)


def length(heads: Range) -> int:
    """Return how many heads a range has."""
    return heads[1] - heads[0]
