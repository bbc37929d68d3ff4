"""What the ranks of a run tell one another through the store, and who of them compares it.

    call         "-", or "<run>:<rank>": that rank waits, compares what all say, and asks them to say it; "<run>:end", "<run>:last-<rank>"
    rank/<rank>  that rank's last report
    late/<run>   for whom the comparing rank waits, in words
    why/<run>    why the run ends, in words: those of the first rank that knows
    told/<run>   how many ranks know that, or have ended the run themselves

A rank that does not wait reads `call` every other second, and writes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from torch._C._distributed_c10d import Store

from lightning_sp.comm.hangs.report import SILENT_S, Report, Seen
from lightning_sp.comm.hangs.side_channel import SideChannel

_CALL, _NOBODY, _END, _LAST = "call", "-", "end", "last-"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a rank learns from the others.

    Args:
        is_asked: some rank waits, and asks this one what it does.
        seen: what all ranks do, where this one compares it.
        why: the run ends; else empty.
        goes_first: the ranks wait for one another or for one that does nothing, and this one is to end at once, so that the connections of
            others break.
    """

    is_asked: bool = False
    seen: Sequence[Seen] | None = None
    why: str = ""
    goes_first: bool = False


class Meeting:
    """One run's talk. A class because it remembers which reports are new.

    Args:
        channel: the store.
        run: the how many-th run of the world.
        rank: this one.
        world: how many there are.
    """

    def __init__(self, channel: SideChannel, *, run: int, rank: int, world: int) -> None:
        self._channel, self._run, self._rank, self._world = channel, run, rank, world
        self._compares_since: float | None = None
        self._acknowledged = False
        self._numbers: dict[int, int] = {}
        self._changed: dict[int, float] = {}

    def begin(self, report: Report) -> None:
        """Say that this rank has begun the run. Without waiting for the store."""

        def begin(store: Store) -> None:
            store.compare_set(_CALL, "", _NOBODY)
            store.set(_of_rank(self._rank), report.encode())

        self._channel.post(begin)

    def tell(self, report: Report) -> None:
        """Say what this rank does."""
        self._channel.ask(lambda store: store.set(_of_rank(self._rank), report.encode()), within_s=1.0)

    def talk(self, report: Report | None, *, waits: bool) -> Answer | None:
        """Say what this rank does, if anything, and return what it learns; None where the store does not answer.

        Args:
            report: this rank's.
            waits: it waits, and compares what all say where no other rank does.
        """
        return self._channel.ask(lambda store: self._talk(store, report, waits))

    def _talk(self, store: Store, report: Report | None, waits: bool) -> Answer:
        if report is not None:
            store.set(_of_rank(self._rank), report.encode())
        call = store.get(_CALL).decode()
        run, _, word = call.partition(":")
        if run == str(self._run) and not word.isdigit():
            first = word.startswith(_LAST) and word != f"{_LAST}{self._rank}"
            return Answer(why=store.get(self._key("why")).decode(), goes_first=first)
        own = f"{self._run}:{self._rank}"
        if waits and call != own and (run != str(self._run) or self._is_silent(store, int(word))):
            call = store.compare_set(_CALL, call, own).decode()
        if call != own:
            self._compares_since = None
            return Answer(is_asked=call.partition(":")[2].isdigit())
        if self._compares_since is None:
            self._compares_since = time.monotonic()
            # What was read before may be old: it says nothing of now.
            self._numbers, self._changed = {}, {}
        return Answer(is_asked=True, seen=self._seen(_read(store, range(self._world))))

    def step_down(self) -> None:
        """Compare no more: this rank does not wait any longer."""
        if self._compares_since is not None:
            self._compares_since = None
            own = f"{self._run}:{self._rank}"

            def step_down(store: Store) -> None:
                store.compare_set(_CALL, own, _NOBODY)
                store.set(self._key("late"), "")

            self._channel.ask(step_down, within_s=1.0)

    def say_late(self, words: str) -> None:
        """Say for whom the ranks wait."""
        self._channel.ask(lambda store: store.set(self._key("late"), words), within_s=1.0)

    def late(self) -> str:
        """Return for whom the ranks wait, as the comparing rank has said last; empty if it has said nothing."""
        return self._channel.ask(lambda store: _get(store, self._key("late"))) or ""

    def end(self, words: str, *, last: Sequence[int] = ()) -> str:
        """Say why the run ends, unless a rank has said so, and return what the first one has said.

        Args:
            words: this rank's.
            last: the ranks that wait for one another, or that do nothing. The first of them is the last to go, the others go at once.
        """

        def end(store: Store) -> str:
            first: str = store.compare_set(self._key("why"), "", words).decode()
            store.set(_CALL, f"{self._run}:{_LAST}{min(last)}" if last else f"{self._run}:{_END}")
            return first

        return self._channel.ask(end) or words

    def acknowledge(self) -> None:
        """Say, once, that this rank knows why the run ends, or has ended it itself."""
        if not self._acknowledged:
            self._acknowledged = True
            self._channel.post(lambda store: store.add(self._key("told"), 1))

    def wait_for_all(self, within_s: float) -> None:
        """Wait until all ranks know why the run ends."""
        until = time.monotonic() + within_s
        while time.monotonic() < until:
            told = self._channel.ask(lambda store: store.add(self._key("told"), 0), within_s=1.0)
            if told is None or told >= self._world:
                return
            time.sleep(0.01)

    def why(self) -> str:
        """Return why the run ends; empty if no rank has said so."""
        return self._channel.ask(lambda store: _get(store, self._key("why"))) or ""

    def reports(self, ranks: Sequence[int] | None = None) -> list[Seen]:
        """Return the last word of ranks, whenever it was, of all for None; nothing where the store does not answer."""
        asked = range(self._world) if ranks is None else ranks
        found = self._channel.ask(lambda store: _read(store, asked)) or []
        return [Seen(rank=rank, report=each, age_s=0.0, silent_s=0.0) for rank, each in zip(asked, found, strict=False)]

    def _key(self, name: str) -> str:
        return f"{name}/{self._run}"

    def _seen(self, reports: Sequence[Report | None]) -> list[Seen]:
        return [self._one_seen(rank, report) for rank, report in enumerate(reports)]

    def _one_seen(self, rank: int, report: Report | None) -> Seen:
        now, began = time.monotonic(), self._compares_since or 0.0
        if report is not None and self._is_new(rank, report.number):
            self._changed[rank] = now
        changed = self._changed.get(rank)
        silent_s = now - (began if changed is None else changed)
        return Seen(
            rank=rank,
            report=report,
            age_s=float("inf") if changed is None else now - changed,
            silent_s=silent_s if silent_s > SILENT_S else 0.0,
        )

    def _is_new(self, rank: int, number: int) -> bool:
        """Return whether a report is not the one that was read before; the first one may be old."""
        before = self._numbers.get(rank)
        self._numbers[rank] = number
        return before is not None and before != number

    def _is_silent(self, store: Store, rank: int) -> bool:
        """Return whether the rank that compares has said nothing for long."""
        now, report = time.monotonic(), _get(store, _of_rank(rank))
        if not report or self._is_new(rank, Report.decode(report).number) or rank not in self._changed:
            self._changed[rank] = now
        return now - self._changed[rank] > SILENT_S


def _read(store: Store, ranks: Sequence[int]) -> list[Report | None]:
    keys = [_of_rank(rank) for rank in ranks]
    there = [True] * len(keys) if store.check(keys) else [store.check([key]) for key in keys]
    texts = iter(store.multi_get([key for key, found in zip(keys, there, strict=True) if found]))
    return [Report.decode(next(texts).decode()) if found else None for found in there]


def _get(store: Store, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ""


def _of_rank(rank: int) -> str:
    return f"rank/{rank}"
