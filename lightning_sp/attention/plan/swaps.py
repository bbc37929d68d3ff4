"""Units dealt to ring ranks, and swaps of two until all ranks compute about equally many (query, key) pairs.

A rank that computes too much swaps a unit with one that computes little, and all such pairs of ranks at once: in each round the busiest swaps
with the least busy, the next with the next. Among the swaps of two ranks that balance them best, that is made which moves the fewest keys and
makes the fewest kernel calls. Integers alone: every rank of the ring finds the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from lightning_sp.attention.plan.units import Integers, Units

# What the busiest rank may compute above the mean, in thousandths: a swap beyond it would move keys for nothing.
LIMIT = 20
# What a key that travels costs beside computing a pair of the same heads: an estimate, of which the kernel's part was measured (45 pairs).
MOVED_PAIRS = 512
# Swaps that are compared in a round, about, and the fewest ranks with which each busy one may swap.
SWAPS, LEAST_PARTNERS = 16384, 4
_NEVER = np.int64(1 << 62)


@dataclass(frozen=True, eq=False)
class Split:
    """Units dealt to ring ranks, equally many to each: `owner` of each, (N,)."""

    units: Units
    owner: Integers

    @cached_property
    def members(self) -> Integers:
        """The units of each rank, rising, (R, N / R)."""
        found: Integers = np.argsort(self.owner, kind="stable").reshape(self.ring, -1)
        return found

    @cached_property
    def loads(self) -> Integers:
        """The pairs of each rank, (R,)."""
        found: Integers = self.units.pairs[self.members].sum(1)
        return found

    @cached_property
    def ring(self) -> int:
        """How many ranks there are."""
        return int(self.owner.max()) + 1

    @property
    def imbalance(self) -> float:
        """The pairs of the busiest rank over the mean of all, less 1."""
        return excess(self.loads)

    @cached_property
    def limit(self) -> int:
        """The load that is balanced enough."""
        return int(self.units.pairs.sum()) * (1000 + LIMIT) // (1000 * self.ring)

    @property
    def within_limit(self) -> bool:
        """Whether the busiest rank is balanced enough."""
        return int(self.loads.max()) <= self.limit

    @cached_property
    def moved_tokens(self) -> int:
        """Keys that some query of another rank sees, once for each such rank."""
        low, high = self.units.low[self.members], self.units.high[self.members]
        low[:, 1:] = np.maximum(low[:, 1:], high[:, :-1])
        return int(np.maximum(high - low, 0).sum() - self.units.own_keys.sum())

    @cached_property
    def num_calls(self) -> int:
        """Calls of the kernel against other ranks' keys: the ranks with units between a unit and its rank's previous one in its document."""
        # Units of each rank before each unit.
        units_before = np.zeros((len(self.owner) + 1, self.ring), dtype=np.int32)
        units_before[np.arange(1, len(units_before)), self.owner] = 1
        units_before = units_before.cumsum(0, dtype=np.int32)
        previous = np.full(len(self.owner), -1, dtype=np.int64)
        previous[self.members[:, 1:]] = self.members[:, :-1]
        between = (units_before[:-1] - units_before[np.maximum(self.units.first, previous + 1)]) > 0
        return int((between.sum(1) * self.units.crossing).sum())

    def overhead(self, call: int) -> int:
        """Moved keys and calls, in pairs of a rank."""
        return (MOVED_PAIRS * self.units.num_layers * self.moved_tokens + call * self.num_calls) // self.ring

    def price(self, call: int) -> int:
        """The time of the busiest rank, in pairs."""
        return int(self.loads.max()) + self.overhead(call)

    def rank(self, call: int) -> tuple[int, int]:
        """What to minimize: first the load above the limit, then what balance costs."""
        return max(int(self.loads.max()) - self.limit, 0), self.price(call)

    def swapped(self, one: Integers, other: Integers) -> Split:
        """Return the split with each unit of `one` in place of that of `other`, and the other way round."""
        owner = self.owner.copy()
        owner[one], owner[other] = self.owner[other], self.owner[one]
        return replace(self, owner=owner)

    def assignment(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Return the ranges of each ring rank, neighbours joined."""
        begins = np.flatnonzero(np.append(True, self.owner[1:] != self.owner[:-1]))
        edges = self.units.edges[np.append(begins, len(self.owner))].tolist()
        ranges: list[list[tuple[int, int]]] = [[] for _ in range(self.ring)]
        for rank, start, end in zip(self.owner[begins].tolist(), edges[:-1], edges[1:], strict=True):
            ranges[rank].append((start, end))
        return tuple(map(tuple, ranges))


def improved(split: Split, call: int, rounds: int) -> Split:
    """Swap units until the busiest rank is within the limit, or no swap helps it.

    Args:
        split: the units as dealt so far.
        call: what a kernel call costs, in pairs.
        rounds: the most rounds.
    """
    skipped = 0
    for _ in range(rounds):
        if split.within_limit:
            break
        order = np.argsort(-split.loads, kind="stable")
        busy, idle = np.split(order, [int((split.loads > split.limit).sum())])
        one, other = _best_swaps(split, *_partners(split, busy, idle[::-1], skipped), call)
        if not len(one):
            one, other = _best_swaps(split, np.repeat(busy[:1], split.ring), np.arange(split.ring), call)
        if not len(one):
            break
        # Of the least busy ranks some have no unit that helps: then the next ones are asked.
        skipped = 0 if 2 * len(one) > len(busy) else skipped + 1
        split = split.swapped(one, other)
    return split


def is_balanceable(units: Units, ring: int) -> bool:
    """Return whether the rank with the largest unit can be within the limit: not if all its others are the smallest, and it is not."""
    pairs = np.sort(units.pairs)
    limit = int(pairs.sum()) * (1000 + LIMIT) // (1000 * ring)
    return int(pairs[-1] + pairs[: len(pairs) // ring - 1].sum()) <= limit


def _partners(split: Split, busy: Integers, idle: Integers, skipped: int) -> tuple[Integers, Integers]:
    """Return pairs of ranks that may swap: each busy one with the idle one of its place, and the next ones.

    Args:
        split: the units as dealt so far.
        busy: ranks above the limit, the busiest first.
        idle: the others, the least busy first.
        skipped: how many times as many idle ranks to leave out.
    """
    number = min(max(SWAPS // (len(busy) * split.members.shape[1] ** 2), LEAST_PARTNERS), len(idle))
    if not number:
        return busy[:0], idle
    place = np.arange(len(busy))[:, None] + np.arange(number) + skipped * number
    return np.repeat(busy, number), idle[place.ravel() % len(idle)]


def _best_swaps(split: Split, busy: Integers, partner: Integers, call: int) -> tuple[Integers, Integers]:
    """Return the units to swap, of busy ranks and of their partners, each rank once: those of the lowest prices; none where no swap helps.

    Args:
        split: the units as dealt so far.
        busy: ranks, (pairs,).
        partner: of each one that it may swap with, (pairs,).
        call: what a kernel call costs, in pairs.
    """
    pairs, members, size = split.units.pairs, split.members, np.diff(split.units.edges)
    own, others, cost = members[busy], members[partner], _Cost.of(split, call)
    less = pairs[own][:, :, None] - pairs[others][:, None, :]
    loads, idle = split.loads[busy][:, None, None], split.loads[partner][:, None, None]
    peak = np.maximum(loads - less, idle + less)
    allowed = (peak < loads) & (size[own][:, :, None] == size[others][:, None, :])
    # Without what the two swapped units have to do with each other.
    removed, given = cost.of_removal(members), cost.of_insertion(own, others)
    taken = cost.of_insertion(others, own)
    change = (removed[busy] + taken)[:, :, None] + (removed[partner] + given)[:, None, :]
    price = np.where(allowed, np.maximum(peak, split.limit) + change // split.ring, _NEVER).reshape(len(busy), -1)
    best = price.argmin(1) if len(price) else np.zeros(0, dtype=np.int64)
    least = price[np.arange(len(best)), best]
    swapped: set[int] = set()
    chosen = []
    for pair in np.argsort(least, kind="stable")[: int((least < _NEVER).sum())].tolist():
        ranks = {int(busy[pair]), int(partner[pair])}
        if not ranks & swapped:
            swapped |= ranks
            chosen.append(pair)
    one, other = np.divmod(best[chosen], members.shape[1])
    return own[chosen, one], others[chosen, other]


@dataclass(frozen=True, eq=False)
class _Cost:
    """What the moved keys and calls of a rank cost, in pairs: a sum over its units of what each adds behind the one before.

    Args:
        low, high, first, crossing: as of `Units`, with one more for no unit.
        changes: how often the owner has changed at each unit, likewise.
        key: of a moved key.
        call: of a kernel call.
        most_calls: of a unit.
    """

    low: Integers
    high: Integers
    first: Integers
    crossing: Integers
    changes: Integers
    key: int
    call: int
    most_calls: int

    @classmethod
    def of(cls, split: Split, call: int) -> _Cost:
        units = split.units
        return cls(
            low=np.append(units.low, 0),
            high=np.append(units.high, 0),
            first=np.append(units.first, 0),
            crossing=np.append(units.crossing, 0),
            changes=np.concatenate([[0], (split.owner[1:] != split.owner[:-1]).cumsum(), [0]]),
            key=MOVED_PAIRS * units.num_layers,
            call=call,
            most_calls=split.ring - 1,
        )

    def _behind(self, before: Integers, unit: Integers) -> Integers:
        """Return what units add behind those before them, -1 for none; nothing for the number behind the last unit.

        Calls are counted as the changes of the owner between the two, from where the unit's documents begin: each rank once or more often.
        """
        keys = np.maximum(self.high[unit] - np.maximum(self.low[unit], self.high[before]), 0)
        begin = np.maximum(self.first[unit], before + 1)
        calls = np.minimum(self.changes[unit - 1] - self.changes[begin] + 1, self.most_calls) * (begin < unit)
        cost: Integers = self.key * keys + self.call * self.crossing[unit] * calls
        return cost

    def of_removal(self, members: Integers) -> Integers:
        """Return what ranks save, negative, without each of their units. Shapes: (ranks, units) -> (ranks, units)."""
        before, after = self._neighbours(members)
        before, after = before[:, :-1], after[:, 1:]
        return self._behind(before, after) - self._behind(before, members) - self._behind(members, after)

    def of_insertion(self, members: Integers, inserted: Integers) -> Integers:
        """Return what ranks pay with each of the units inserted. Shapes: (ranks, units), (ranks, inserted) -> (ranks, inserted)."""
        place = (members[:, None, :] < inserted[:, :, None]).sum(2)
        before, after = (np.take_along_axis(each, place, 1) for each in self._neighbours(members))
        return self._behind(before, inserted) + self._behind(inserted, after) - self._behind(before, after)

    def _neighbours(self, members: Integers) -> tuple[Integers, Integers]:
        """Return the units before and after each gap between a rank's units, its ends among them, (ranks, units + 1) twice."""
        none = np.full_like(members[:, :1], -1)
        return np.concatenate([none, members], 1), np.concatenate([members, none + len(self.low)], 1)


def excess(loads: Integers) -> float:
    """Return the largest load over the mean of all, less 1."""
    total = int(loads.sum())
    return len(loads) * int(loads.max()) / total - 1 if total else 0.0
