"""Ranks that make the others wait in every step, though never for long: told by how often a look finds each rank in a collective.

    a look           is the main thread in a collective? if not, on which line?
    a window ends    each rank puts its counts into the store, and rank 0 compares them
    rank 0 warns     of ranks that were in a collective far more seldom than all others, in the last window or in all that it keeps

A rank that is slow, by its host, its disk, its loader or a callback, comes last to every collective: the others wait for it, and it waits
for nobody. What all wait for alike, a slow network say, makes no difference between them.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise

from torch._C._distributed_c10d import Store

from lightning_sp.comm.hangs.main_thread import Place
from lightning_sp.comm.hangs.report import process_here, told_numbers
from lightning_sp.comm.hangs.side_channel import SideChannel

# Of hang_s, and no longer: so many looks tell a fourth of a step's time from chance, and those of an hour a tenth.
_WINDOWS_OF_HANG_S, _LONGEST_WINDOW_S, _KEPT_WINDOWS = 5.0, 300.0, 12
# Fewer looks say nothing: the window began late, or the process was stopped.
_LEAST_LOOKS = 10
# Others wait a tenth of their time for it: less is what any run has.
_LEAST_GAP = 0.1
# Standard deviations: of ten thousand ranks in a month of windows none is named by chance.
_BEYOND_CHANCE = 6.0
# Behind the end of rank 0's window: the others' may end a moment later.
_LOOKS_AFTER = 5
_SHOWN_LINES = 3


@dataclass(frozen=True, kw_only=True)
class Looks:
    """What the looks of one window have found on a rank.

    Args:
        rank: which.
        run: the how many-th of the world.
        window: counts the windows of this run.
        num: how many looks.
        num_waits: how many of them found it in a collective.
        lines: where the others found it most often, with how many.
        process: its number, host and name space.
    """

    rank: int
    run: int
    window: int
    num: int
    num_waits: int
    lines: tuple[tuple[str, int], ...] = ()
    process: tuple[int, str, str] = (0, "", "")

    @property
    def share(self) -> float:
        """Return which part of the looks found it in a collective."""
        return self.num_waits / self.num

    def encode(self) -> str:
        """Return it as text."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> Looks:
        """Return what `encode` was given."""
        values = json.loads(text)
        lines = tuple((line, num) for line, num in values["lines"])
        return cls(**{**values, "lines": lines, "process": tuple(values["process"])})


class SlowRanks:
    """Counts this rank's looks, and compares those of all on rank 0. A class because a window lives for many looks.

    Args:
        channel: to the store.
        run: the how many-th of the world.
        rank: this one.
        world: how many there are.
        hang_s: of which a window lasts five times as long, 300 s at most.
    """

    def __init__(self, channel: SideChannel, *, run: int, rank: int, world: int, hang_s: float) -> None:
        self._channel, self._run, self._rank, self._world = channel, run, rank, world
        self._window_s = min(_LONGEST_WINDOW_S, _WINDOWS_OF_HANG_S * hang_s)
        self._began, self._window = 0.0, 0
        self._waits = 0
        self._lines: Counter[str] = Counter()
        self._compares_in = 0
        self._compared: dict[int, int] = {}
        self._kept: deque[list[Looks]] = deque(maxlen=_KEPT_WINDOWS)
        self._named: list[int] = []

    def look(self, place: Place) -> str:
        """Note where the main thread is, and return of which ranks to warn, in words; empty for none.

        Communicates: where a window ends, one entry in the store, and rank 0 reads those of all.
        """
        now = time.monotonic()
        self._began = self._began or now
        if now - self._began >= self._window_s:
            self._end_window()
            self._began = now
        if place.collective:
            self._waits += 1
        else:
            self._lines[_told(place)] += 1
        self._compares_in -= 1
        return self._compare() if self._compares_in == 0 else ""

    def _end_window(self) -> None:
        self._window += 1
        num = self._waits + self._lines.total()
        lines = tuple(self._lines.most_common(_SHOWN_LINES))
        looks = Looks(
            rank=self._rank, run=self._run, window=self._window, num=num, num_waits=self._waits, lines=lines, process=process_here(),
        )  # fmt: skip
        self._waits, self._lines = 0, Counter()
        self._channel.post(lambda store: store.set(_of_rank(self._rank), looks.encode()))
        if self._rank == 0:
            self._compares_in = _LOOKS_AFTER

    def _compare(self) -> str:
        found = [each for each in self._channel.ask(self._read) or [] if each.run == self._run]
        new = [each for each in found if each.window > self._compared.get(each.rank, 0) and each.num >= _LEAST_LOOKS]
        if len(new) < self._world:
            return ""  # one that was stopped for a while, say: another window comes
        self._compared = {each.rank: each.window for each in new}
        self._kept.append(new)
        before, self._named = self._named, []
        for windows in (list(self._kept)[-1:], list(self._kept)):
            added = _added(windows)
            if slow := slow_ranks(added):
                self._named = slow
                return told_slow(added, slow, len(windows) * self._window_s) if slow != before else ""
        return ""

    def _read(self, store: Store) -> list[Looks]:
        keys = [_of_rank(rank) for rank in range(self._world)]
        return [Looks.decode(each.decode()) for each in store.multi_get(keys)] if store.check(keys) else []


def slow_ranks(of_ranks: Sequence[Looks]) -> list[int]:
    """Return the ranks that were in a collective far more seldom than all others: half of them at most, beyond what chance does.

    Args:
        of_ranks: of one window, two ranks or more.
    """
    ordered = sorted(of_ranks, key=lambda each: each.share)
    gap, num = max((after.share - before.share, num) for num, (before, after) in enumerate(pairwise(ordered), 1))
    last, first = ordered[num - 1], ordered[num]
    chance = math.sqrt(_variance(last) + _variance(first))
    if num > len(ordered) / 2 or gap < max(_LEAST_GAP, _BEYOND_CHANCE * chance):
        return []
    return sorted(each.rank for each in ordered[:num])


def told_slow(of_ranks: Sequence[Looks], slow: Sequence[int], window_s: float) -> str:
    """Return by what ranks are slow, in words.

    Args:
        of_ranks: of one window, all ranks.
        slow: of `slow_ranks`.
        window_s: how long it was.
    """
    own = [each for each in of_ranks if each.rank in slow]
    others = [each for each in of_ranks if each.rank not in slow]
    are = (
        f"rank {slow[0]} is slow, and the others wait"
        if len(slow) == 1
        else f"ranks {told_numbers(slow)} are slow, and the others wait"
    )
    words = f"{are}: in the last {window_s:.0f} s {_range(own)} of the looks found {'it' if len(slow) == 1 else 'them'} in a collective, and "
    words += f"{_range(others)} found the others there. A step lasts as long as its slowest rank needs."
    for each in own[:_SHOWN_LINES]:
        number, host, _ = each.process
        lines = "".join(f"\n    {num / each.num:.0%} of the looks in {line}" for line, num in each.lines)
        words += f"\nrank {each.rank} (process {number} on {host}) was found:{lines}"
    return words


def _added(windows: Sequence[Sequence[Looks]]) -> list[Looks]:
    """Return each rank's looks of several windows together."""
    added = []
    for of_rank in zip(*windows, strict=True):
        lines: Counter[str] = Counter()
        for each in of_rank:
            lines.update(dict(each.lines))
        num, num_waits = sum(each.num for each in of_rank), sum(each.num_waits for each in of_rank)
        most = tuple(lines.most_common(_SHOWN_LINES))
        added.append(replace(of_rank[-1], num=num, num_waits=num_waits, lines=most))
    return added


def _variance(looks: Looks) -> float:
    # By the rule of succession: all of ten looks are not certainty.
    share = (looks.num_waits + 1) / (looks.num + 2)
    return share * (1 - share) / looks.num


def _range(of_ranks: Sequence[Looks]) -> str:
    shares = [each.share for each in of_ranks]
    low, high = f"{min(shares):.0%}", f"{max(shares):.0%}"
    return low if low == high else f"{low} to {high}"


def _told(place: Place) -> str:
    """Return the line where a thread is, and the user's from which it came there."""
    inner = place.stack[-1] if place.stack else "no line"
    return f"{inner}, from {place.line}" if place.line and place.line != inner else inner


def _of_rank(rank: int) -> str:
    return f"looks/{rank}"
