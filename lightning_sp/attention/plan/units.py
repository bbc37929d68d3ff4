"""The units of a sequence that a balanced layout deals to ring ranks, and what the queries of each see. Pure functions of integers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_sp.attention.plan.intervals import Range, visible
from lightning_sp.attention.spec.mask import AttentionMask

Integers = NDArray[np.int64]

_NEVER = np.int64(1 << 62)


@dataclass(frozen=True, eq=False)
class Pieces:
    """The pieces of all rows and layers (`intervals.Piece`), as one line of queries: those of a row and mask, then those of the next.

    Args:
        start, stop: of their queries, (pieces,), each row and mask at a multiple of `length`.
        low, low_step, high, high_step: what they see, in positions of the sequence, (pieces,).
        layers: how many layers have each, (pieces,).
        num_lines: rows and masks.
        num_layers: how many layers there are.
        length: tokens of a row.
    """

    start: Integers
    stop: Integers
    low: Integers
    low_step: Integers
    high: Integers
    high_step: Integers
    layers: Integers
    num_lines: int
    num_layers: int
    length: int

    @classmethod
    def of(cls, masks: Sequence[AttentionMask], length: int) -> Pieces:
        """Return those of what a query may see in each attention layer, the same object for layers alike."""
        times = Counter(map(id, masks))
        runs = [
            (times[id(mask)], run)
            for mask in {id(mask): mask for mask in masks}.values()
            for row in range(_rows(mask))
            for run in visible(mask, row, length)
        ]
        columns = [
            (line * length + p.start, line * length + p.end, p.low, p.low_step, p.high, p.high_step, layers)
            for line, (layers, run) in enumerate(runs)
            for p in run
        ]
        start, stop, low, low_step, high, high_step, layers = np.array(columns, dtype=np.int64).reshape(-1, 7).T
        return cls(
            start=start,
            stop=stop,
            low=low,
            low_step=low_step,
            high=high,
            high_step=high_step,
            layers=layers,
            num_lines=len(runs),
            num_layers=len(masks),
            length=length,
        )

    def cut(self, edges: Integers) -> _Parts:
        """Cut the pieces at the edges of units, (N + 1,)."""
        lines = np.arange(self.num_lines, dtype=np.int64)[:, None] * self.length
        at = np.unique(np.concatenate([self.start, self.stop, (lines + edges).ravel()]))
        begin, end = at[:-1], at[1:]
        piece = np.searchsorted(self.start, begin, side="right") - 1
        within = (piece >= 0) & (begin < np.append(self.stop, 0)[piece])
        begin, end, piece = begin[within], end[within], piece[within]
        on, unit = begin - self.start[piece], np.searchsorted(edges, begin % max(self.length, 1), side="right") - 1
        low, high = self.low[piece] + self.low_step[piece] * on, self.high[piece] + self.high_step[piece] * on
        return _Parts(
            unit=unit,
            starts_unit=begin % max(self.length, 1) == edges[unit],
            count=end - begin,
            low=low,
            high=high,
            low_step=self.low_step[piece],
            high_step=self.high_step[piece],
            layers=self.layers[piece],
        )


@dataclass(frozen=True, eq=False)
class _Parts:
    """Parts of pieces, each within a unit; as `Pieces`, with how many queries each has."""

    unit: Integers
    starts_unit: NDArray[np.bool_]
    count: Integers
    low: Integers
    high: Integers
    low_step: Integers
    high_step: Integers
    layers: Integers

    def pairs(self, num_units: int) -> Integers:
        """Return the (query, key) pairs of each unit."""
        steps = (self.high_step - self.low_step) * (self.count * (self.count - 1) // 2)
        found = np.zeros(num_units, dtype=np.int64)
        np.add.at(found, self.unit, (self.count * (self.high - self.low) + steps) * self.layers)
        return found


@dataclass(frozen=True, eq=False)
class Units:
    """The units of a sequence, and what the queries of each see, all rows and layers together.

    Args:
        edges: where they begin, and the end, (N + 1,).
        pairs: (query, key) pairs of each unit's queries, (N,).
        low: the first key that a query of the unit or of a later one sees, or the unit's first token, (N,).
        high: after the last key that a query of the unit or of an earlier one sees, (N,).
        crossing: rows in which a document goes on from the unit before, of all layers, (N,).
        num_layers: how many layers these are.
    """

    edges: Integers
    pairs: Integers
    low: Integers
    high: Integers
    crossing: Integers
    num_layers: int

    @classmethod
    def cut(cls, pieces: Pieces, ring: int, units: int) -> Units:
        """Cut each of the 2R chunks in units, alike: the first ones are a token longer where the chunk does not divide."""
        length = pieces.length
        chunk = length // (2 * ring) if ring > 1 else length
        inner = np.arange(units, dtype=np.int64) * chunk // units
        edges = np.append((np.arange(length // max(chunk, 1), dtype=np.int64)[:, None] * chunk + inner).ravel(), length)
        begin, parts = edges[:-1], pieces.cut(edges)
        low, high, crossing = begin.copy(), np.zeros_like(begin), np.zeros_like(begin)
        np.minimum.at(low, parts.unit, parts.low)
        np.maximum.at(high, parts.unit, parts.high + parts.high_step * (parts.count - 1))
        goes_on = parts.starts_unit & (parts.low < begin[parts.unit])
        np.add.at(crossing, parts.unit[goes_on], parts.layers[goes_on])
        low, high = np.minimum.accumulate(low[::-1])[::-1], np.maximum.accumulate(high)
        return cls(edges, parts.pairs(len(begin)), low, high, crossing, max(pieces.num_layers, 1))

    @property
    def first(self) -> Integers:
        """Return the first unit of which a query of each unit sees a key, (N,)."""
        found: Integers = np.searchsorted(self.edges, self.low, side="right") - 1
        return found

    @property
    def own_keys(self) -> Integers:
        """Return how many of its own tokens the queries of each unit see, (N,)."""
        seen = np.minimum(self.high, self.edges[1:]) - np.maximum(self.low, self.edges[:-1])
        found: Integers = np.maximum(seen, 0)
        return found


def pairs_of_ranges(pieces: Pieces, ranges: Sequence[Range]) -> Integers:
    """Return the pairs of the queries of ranges [start, end) that lie side by side and fill the sequence, (ranges,)."""
    edges = np.array([*(start for start, _ in ranges), pieces.length], dtype=np.int64)
    return pieces.cut(edges).pairs(len(edges) - 1)


def _rows(mask: AttentionMask) -> int:
    tensors = [t for t in (mask.boundaries, mask.valid, mask.bidirectional) if t is not None]
    return max([t.shape[0] for t in tensors], default=1)
