"""Which tokens each ring rank has so that all compute equally many (query, key) pairs: a layout for the documents of one batch.

Each of the 2R chunks of zigzag is cut in 2, 4 or 8 units of equal length, and every ring rank gets equally many units:

    documents     a a a a a a a a a a b b b c c d      R = 2, one letter a unit: a's late queries see the most keys
    zigzag        0 0 0 0 1 1 1 1 1 1 1 1 0 0 0 0      rank 1 computes 54% more pairs than the mean
    balanced      0 0 0 0 1 1 1 1 0 0 1 1 1 1 0 0      1.8%

What a unit's queries compute does not depend on which rank has the other units. So the search swaps units between busy ranks and idle ones
until the busiest is within `swaps.LIMIT` of the mean. It counts in integers alone, so that every rank finds the same. Pure functions; no
process, no collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from lightning_sp.attention.plan.swaps import Split, excess, improved, is_balanceable
from lightning_sp.attention.plan.units import Integers, Pieces, Units, pairs_of_ranges
from lightning_sp.attention.spec.mask import AttentionMask
from lightning_sp.layout import SequenceLayout

# Units of a chunk, tried one after the other until the busiest rank is within the limit.
UNITS = (2, 4, 8)
# The most rounds of swaps, where smaller units can be tried, and where not.
ROUNDS, LAST_ROUNDS = 12, 64
# What the busiest rank computes above the mean after these where smaller units are sooner dealt than these from another start.
FAR = 0.05
# What a kernel call costs beside computing a pair: measured forward and backward on the CPU, 8 heads of 64 (docs/log/balance.md). That of a
# CUDA launch is arithmetic alone, 50 us beside 1e-10 s a pair, and was not measured.
CALL_PAIRS = {"cpu": 4_000, "cuda": 500_000}


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
    ring, pieces = degrees.ring_size, Pieces.of(masks, length)
    call = CALL_PAIRS.get(device, CALL_PAIRS["cuda"])
    best: Split | None = None
    zigzag = Split(Units.cut(pieces, ring, 1), _zigzag(ring, 1))
    tried = [units for units in UNITS if length >= 2 * ring * units and not zigzag.within_limit]
    for units in tried:
        cut, is_last = Units.cut(pieces, ring, units), units == tried[-1]
        if not is_last and not is_balanceable(cut, ring):
            continue
        for owner in (_zigzag(ring, units), np.repeat(np.arange(ring), 2 * units)):
            found = improved(Split(cut, owner), call, LAST_ROUNDS if is_last else ROUNDS)
            if best is None or found.rank(call) < best.rank(call):
                best = found
            if not is_last and found.imbalance > FAR:
                break
        if best is not None and best.within_limit:
            break
    if best is None or np.array_equal(best.owner, _zigzag(ring, len(best.owner) // (2 * ring))):
        best = zigzag
    layout = degrees if best is zigzag else replace(degrees, assignment=best.assignment())
    pays = best is not zigzag and best.price(call) < zigzag.price(call)
    return Balance(layout, best.imbalance, zigzag.imbalance, best.moved_tokens, zigzag.moved_tokens, pays)


def imbalance(masks: Sequence[AttentionMask], layout: SequenceLayout, length: int) -> float:
    """Return the pairs of a layout's busiest ring rank over the mean of all, less 1."""
    ranges = sorted(
        (start, end, rank) for rank in range(layout.ring_size) for start, end in layout.ring_chunks(length, rank)
    )
    loads = np.zeros(layout.ring_size, dtype=np.int64)
    np.add.at(loads, [rank for *_, rank in ranges], pairs_of_ranges(Pieces.of(masks, length), [r[:2] for r in ranges]))
    return excess(loads)


def _zigzag(ring: int, units: int) -> Integers:
    chunks = np.arange(2 * ring, dtype=np.int64) if ring > 1 else np.zeros(1, dtype=np.int64)
    return np.repeat(np.minimum(chunks, 2 * ring - 1 - chunks), units)
