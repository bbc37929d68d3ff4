"""Which tokens each ring rank has so that all compute equally many (query, key) pairs: a layout for the documents of one batch.

Each of the 2R chunks of zigzag is cut in 2, 4 or 8 units of equal length, and every ring rank gets equally many units:

    documents     a a a a a a a a a a b b b c c d      R = 2, one letter a unit: a's late queries see the most keys
    zigzag        0 0 0 0 1 1 1 1 1 1 1 1 0 0 0 0      rank 1 computes 54% more pairs than the mean
    balanced      0 0 0 0 1 1 1 1 0 0 1 1 1 1 0 0      1.8%

What a unit's queries compute does not depend on which rank has the other units. So the search swaps units between the busiest rank and another
until the busiest is within `LIMIT` of the mean; among swaps it chooses what moves the fewest keys and makes the fewest kernel calls. It counts
in integers alone, so that every rank finds the same. Pure functions; no process, no collective.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lightning_sp.attention.plan.intervals import visible
from lightning_sp.attention.spec.mask import AttentionMask
from lightning_sp.layout import SequenceLayout

Integers = NDArray[np.int64]

# Units of a chunk, tried one after the other until the busiest rank is within the limit.
UNITS = (2, 4, 8)
# What the busiest rank may compute above the mean, in thousandths: a swap beyond it would move keys for nothing.
LIMIT = 20
# What a key that travels costs beside computing a pair of the same heads: an estimate, of which the kernel's part was measured (45 pairs). What
# a kernel call costs: measured forward and backward on the CPU, 8 heads of 64 (docs/log/balance.md). That of a CUDA launch is arithmetic alone,
# 50 us beside 1e-10 s a pair, and was not measured.
MOVED_PAIRS = 512
CALL_PAIRS = {"cpu": 4_000, "cuda": 500_000}
# Swaps whose keys are counted before one is made, and the most swaps of a search.
CANDIDATES = 8
MOST_SWAPS = 200
_NEVER = np.int64(1 << 62)


@dataclass(frozen=True)
class Balance:
    """A layout for a batch's documents, beside zigzag.

    Args:
        layout: the best found; without an assignment where that is zigzag.
        imbalance: pairs of its busiest ring rank over the mean of all, less 1.
        zigzag_imbalance: the same of zigzag.
        moved_tokens: keys that travel between its ring ranks in a forward.
        zigzag_moved_tokens: the same of zigzag.
        pays: whether it should take less time than zigzag, moved keys and kernel calls counted.
    """

    layout: SequenceLayout
    imbalance: float
    zigzag_imbalance: float
    moved_tokens: int
    zigzag_moved_tokens: int
    pays: bool

    def describe(self) -> str:
        """Return one line: what the layout is, and what the other would be."""
        found, before = f"{100 * self.imbalance:.1f}%", f"{100 * self.zigzag_imbalance:.1f}%"
        used, other = ("balanced", "zigzag") if self.layout.assignment else ("zigzag", "balanced")
        used_excess, other_excess = (found, before) if self.layout.assignment else (before, found)
        return (
            f"packed documents over a ring of {self.layout.ring_size}, first batch: {used}, the busiest rank computes {used_excess} more "
            f"(query, key) pairs than the mean; {other} it would be {other_excess}"
        )


def balance(masks: Sequence[AttentionMask], degrees: SequenceLayout, length: int, *, device: str = "cpu") -> Balance:
    """Return a layout in which all ring ranks compute about equally many pairs, and the same number of tokens.

    Args:
        masks: what a query may see in each attention layer, the same object for layers alike. The pairs of all layers and of all rows count
            together, for all are split alike.
        degrees: ring and Ulysses ranks.
        length: global tokens, padding included.
        device: type of the device that computes.
    """
    ring, pieces = degrees.ring_size, _table(masks, length)
    call = CALL_PAIRS.get(device, CALL_PAIRS["cuda"])
    best: _Split | None = None
    zigzag = _Split(_Units.cut(pieces, length, ring, 1), _zigzag(ring, 1))
    for units in () if zigzag.within_limit else UNITS:
        if length < 2 * ring * units:
            break
        cut = _Units.cut(pieces, length, ring, units)
        for owner in (_zigzag(ring, units), np.repeat(np.arange(ring), 2 * units)):
            found = _improved(_Split(cut, owner), call)
            if best is None or found.rank(call) < best.rank(call):
                best = found
        if best is not None and best.within_limit:
            break
    if best is None or np.array_equal(best.owner, _zigzag(ring, len(best.owner) // (2 * ring))):
        best = zigzag
    layout = degrees if best is zigzag else replace(degrees, assignment=best.assignment())
    pays = best is not zigzag and best.price(call) < zigzag.price(call)
    return Balance(layout, best.imbalance, zigzag.imbalance, best.moved_tokens, zigzag.moved_tokens, pays)


def imbalance(masks: Sequence[AttentionMask], layout: SequenceLayout, length: int) -> float:
    """Return the pairs of a layout's busiest ring rank over the mean of all, less 1."""
    pieces = _table(masks, length)
    loads = []
    for rank in range(layout.ring_size):
        edges = np.array(layout.ring_chunks(length, rank), dtype=np.int64)
        loads.append(int((_pairs_before(pieces, edges[:, 1]) - _pairs_before(pieces, edges[:, 0])).sum()))
    return _excess(np.array(loads, dtype=np.int64))


@dataclass(frozen=True, eq=False)
class _Units:
    """The units of a sequence, and what the queries of each see.

    Args:
        edges: where they begin, and the end, (N + 1,).
        pairs: (query, key) pairs of each unit's queries, all rows and layers together, (N,).
        keys: how many keys of unit j some query of unit i sees, (N, N).
        first: the first unit of which a query of unit i sees a key, (N,).
        crossing: rows in which a document goes on from the unit before, of all layers, (N,).
        layers: how many layers these are.
    """

    edges: Integers
    pairs: Integers
    keys: Integers
    first: Integers
    crossing: Integers
    layers: int

    @classmethod
    def cut(cls, pieces: Integers, length: int, ring: int, units: int) -> _Units:
        """Cut each of the 2R chunks in units, alike: the first ones are a token longer where the chunk does not divide."""
        chunk = length // (2 * ring) if ring > 1 else length
        inner = np.arange(units, dtype=np.int64) * chunk // units
        edges = np.append((np.arange(length // max(chunk, 1), dtype=np.int64)[:, None] * chunk + inner).ravel(), length)
        begin, end = edges[:-1], edges[1:]
        start, stop, low, low_step, high, high_step, weight, layers = pieces
        high_of_last = high + high_step * (np.minimum(stop, end[:, None]) - 1 - start)
        from_, upto = np.maximum(start, begin[:, None]), np.minimum(stop, end[:, None])
        some = from_ < upto
        lowest = np.where(some, low + low_step * (from_ - start), _NEVER)
        highest = np.where(some, high_of_last, 0).max(1, initial=0)
        crossing = ((from_ == begin[:, None]) & (lowest < begin[:, None])) @ weight
        lowest = np.minimum(lowest.min(1, initial=_NEVER), begin)
        keys = np.minimum(highest[:, None], end) - np.maximum(lowest[:, None], begin)
        first = np.searchsorted(edges, lowest, side="right") - 1
        pairs = np.diff(_pairs_before(pieces, edges))
        return cls(edges, pairs, np.maximum(keys, 0), first, crossing, int(layers.max(initial=1)))


@dataclass(frozen=True, eq=False)
class _Split:
    """Units dealt to ring ranks: `owner` of each, (N,)."""

    units: _Units
    owner: Integers

    @cached_property
    def loads(self) -> Integers:
        pairs: Integers = (self.owner == np.arange(self.ring)[:, None]) @ self.units.pairs
        return pairs

    @cached_property
    def ring(self) -> int:
        return int(self.owner.max()) + 1

    @property
    def imbalance(self) -> float:
        return _excess(self.loads)

    @cached_property
    def limit(self) -> int:
        """The load that is balanced enough."""
        return int(self.units.pairs.sum()) * (1000 + LIMIT) // (1000 * self.ring)

    @property
    def within_limit(self) -> bool:
        return int(self.loads.max()) <= self.limit

    @cached_property
    def moved_tokens(self) -> int:
        """Keys that some query of another rank sees, once for each such rank."""
        order = np.argsort(self.owner, kind="stable")
        begin = np.searchsorted(self.owner[order], np.arange(self.ring))
        needed = np.maximum.reduceat(self.units.keys[order], begin, axis=0)
        needed[self.owner, np.arange(len(self.owner))] = 0
        return int(needed.sum())

    @cached_property
    def num_calls(self) -> int:
        """Calls of the kernel against other ranks' keys: the ranks with units between a unit and its rank's previous one in its document."""
        # Units of each rank before each unit.
        units_before = np.zeros((len(self.owner) + 1, self.ring), dtype=np.int64)
        units_before[np.arange(1, len(units_before)), self.owner] = 1
        units_before = units_before.cumsum(0)
        order = np.argsort(self.owner, kind="stable")
        previous = np.full(len(order), -1, dtype=np.int64)
        previous[order[1:]] = np.where(self.owner[order[1:]] == self.owner[order[:-1]], order[:-1], -1)
        between = (units_before[:-1] - units_before[np.maximum(self.units.first, previous + 1)]) > 0
        return int((between.sum(1) * self.units.crossing).sum())

    def overhead(self, call: int) -> int:
        """Moved keys and calls, in pairs of a rank."""
        return (MOVED_PAIRS * self.units.layers * self.moved_tokens + call * self.num_calls) // self.ring

    def price(self, call: int) -> int:
        """The time of the busiest rank, in pairs."""
        return int(self.loads.max()) + self.overhead(call)

    def rank(self, call: int) -> tuple[int, int]:
        """What to minimize: first the load above the limit, then what balance costs."""
        return max(int(self.loads.max()) - self.limit, 0), self.price(call)

    def assignment(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Return the ranges of each ring rank, neighbours joined."""
        begins = np.flatnonzero(np.append(True, self.owner[1:] != self.owner[:-1]))
        edges = self.units.edges[np.append(begins, len(self.owner))].tolist()
        ranges: list[list[tuple[int, int]]] = [[] for _ in range(self.ring)]
        for rank, start, end in zip(self.owner[begins].tolist(), edges[:-1], edges[1:], strict=True):
            ranges[rank].append((start, end))
        return tuple(map(tuple, ranges))


def _improved(split: _Split, call: int) -> _Split:
    """Swap units until the busiest rank is within the limit, or no swap helps it."""
    for _ in range(MOST_SWAPS):
        if split.within_limit:
            break
        found = min(_swaps(split, call), default=None, key=lambda each: each[0])
        if found is None:
            break
        split = found[1]
    return split


def _swaps(split: _Split, call: int) -> Iterator[tuple[int, _Split]]:
    """Yield the price of the most promising swaps of the busiest rank with another, neither of which is as busy after."""
    owner, loads, pairs = split.owner, split.loads, split.units.pairs
    size = np.diff(split.units.edges)
    busiest = int(loads.argmax())
    own, other = np.flatnonzero(owner == busiest), np.flatnonzero(owner != busiest)
    less = pairs[own][:, None] - pairs[other]
    peak = np.maximum(loads[busiest] - less, loads[owner[other]] + less)
    allowed = (peak < loads[busiest]) & (size[own][:, None] == size[other])
    peak = np.where(allowed, np.maximum(peak, split.limit), _NEVER)
    for swap in np.argsort(peak, axis=None, kind="stable")[:CANDIDATES].tolist():
        i, j = divmod(swap, len(other))
        if peak[i, j] == _NEVER:
            return
        swapped = owner.copy()
        swapped[own[i]], swapped[other[j]] = owner[other[j]], busiest
        found = replace(split, owner=swapped)
        yield int(peak[i, j]) + found.overhead(call), found


def _zigzag(ring: int, units: int) -> Integers:
    chunks = np.arange(2 * ring, dtype=np.int64) if ring > 1 else np.zeros(1, dtype=np.int64)
    return np.repeat(np.minimum(chunks, 2 * ring - 1 - chunks), units)


def _table(masks: Sequence[AttentionMask], length: int) -> Integers:
    """Return the pieces of all rows in columns, with how many layers have each, and how many there are: (8, pieces)."""
    times = Counter(map(id, masks))
    columns = [
        (p.start, p.end, p.low, p.low_step, p.high, p.high_step, times[id(mask)], len(masks))
        for mask in {id(mask): mask for mask in masks}.values()
        for row in range(_rows(mask))
        for run in visible(mask, row, length)
        for p in run
    ]
    return np.array(columns, dtype=np.int64).reshape(-1, 8).T


def _rows(mask: AttentionMask) -> int:
    tensors = [t for t in (mask.boundaries, mask.valid, mask.bidirectional) if t is not None]
    return max([t.shape[0] for t in tensors], default=1)


def _pairs_before(pieces: Integers, edges: Integers) -> Integers:
    """Return how many pairs the queries before each edge have. Shapes: (8, pieces), (n,) -> (n,)."""
    start, stop, low, low_step, high, high_step, weight, _ = pieces
    count = np.clip(edges[:, None], start, stop) - start
    pairs: Integers = (count * (high - low) + (high_step - low_step) * (count * (count - 1) // 2)) @ weight
    return pairs


def _excess(loads: Integers) -> float:
    total = int(loads.sum())
    return len(loads) * int(loads.max()) / total - 1 if total else 0.0
