"""Ranks that wait for each other in meetings of different groups, each missed where another waits.

    rank 0    waits for rank 1 in a meeting of all ranks       a loop of its own goes round once more
    rank 1    waits for rank 0 in a meeting of its pair

Who waits in a meeting comes to no other before all of it are there. So where this rank is missed by one that it waits for, neither will go on.
"""

from __future__ import annotations

import json
from contextlib import suppress
from threading import Event, Thread
from typing import Any, NamedTuple

import torch.distributed as dist

from lightning_sp.errors import SequenceParallelError

# Between two looks: a wait is looked at when it was there before, then ever more seldom.
_FIRST_S, _LONGEST_S = 0.5, 16.0


class Arrival(NamedTuple):
    """A rank that has come to a meeting.

    Args:
        what: the collective that it has come for.
        rank: who.
        line: of the user's code.
    """

    what: str
    rank: int
    line: str


class _Wait(NamedTuple):
    """A rank that waits in a meeting for all of its group.

    Args:
        meeting: the store's key of its decision, <key of how many have come>/<number>.
        ranks: of the group.
        arrival: who waits, and for what.
    """

    meeting: str
    ranks: tuple[int, ...]
    arrival: Arrival


def came_apart(one: Arrival, other: Arrival) -> SequenceParallelError:
    """Return the error of two ranks that have come to different collectives."""
    both = ", ".join(f"rank {each.rank} to {each.what} ({each.line})" for each in (one, other))
    return SequenceParallelError(
        f"ranks come to different collectives: {both}. Code that one rank alone runs (`if self.trainer.is_global_zero:`) may not compute "
        "with tensors whose tokens lie on several: compute on all of them, and print, log or keep the number on one. A loop that ends by a "
        "rank's own tokens (`while (p < 1).any():`) runs more often on one: let the whole sequence's end it "
        "(lightning_sp.reductions.sequence_max), or use global_view=True"
    )


class CircularWaits:
    """The waits of one block of code. A thread looks at those that last, and ends this rank's: a class because it has a connection of its own.

    <key>/waits/<rank>               the last meeting that it waited in for long

    Args:
        store: that the ranks meet in.
        key: of the block.
        stop: the decision that ends a wait.
    """

    def __init__(self, store: Any, key: str, stop: str) -> None:
        self._shared, self._key, self._stop = store, f"{key}/waits", stop
        self._store: Any = None
        self._over = Event()
        self._thread: Thread | None = None
        self._own: _Wait | None = None
        self._error: SequenceParallelError | None = None

    def decision(self, meeting: str, ranks: list[int], what: str, line: str) -> str:
        """Wait until a meeting is decided, and return how.

        Args:
            meeting: the decision's key.
            ranks: of its group.
            what: the collective that this rank has come for.
            line: of the user's code.

        Raises:
            SequenceParallelError: a rank that this one waits for waits for it elsewhere.
        """
        if self._thread is None:
            self._thread = Thread(target=self._look, name="lightning_sp circular waits", daemon=True)
            self._thread.start()
        self._own = _Wait(meeting, tuple(ranks), Arrival(what, dist.get_rank(), line))
        try:
            found: str = self._shared.get(meeting).decode()
        finally:
            self._own = None
        if self._error is not None:
            raise self._error
        return found

    def close(self) -> None:
        """Let the thread end."""
        self._over.set()

    def _look(self) -> None:
        last, patience_s = None, _FIRST_S
        with suppress(dist.DistError, RuntimeError):  # of a store that is out of reach the wait itself tells
            while not self._over.wait(patience_s):
                own = self._own
                patience_s = _FIRST_S if own is not last else min(2 * patience_s, _LONGEST_S)
                if own is not None and own is last:
                    self._look_at(own)
                last = own

    def _look_at(self, own: _Wait) -> None:
        """Tell the others of a wait that lasts, and end it where it cannot end."""
        if self._store is None:
            self._store = self._shared.clone()
        self._store.set(f"{self._key}/{own.arrival.rank}", json.dumps(own))
        if (other := self._who_misses(own)) is not None:
            self._error = came_apart(other, own.arrival)
            self._store.compare_set(own.meeting, "", self._stop)

    def _who_misses(self, own: _Wait) -> Arrival | None:
        """Return who waits for this rank elsewhere, of those that it waits for, or that these wait for."""
        seen, paths = {own.arrival.rank}, [[own]]
        while paths:
            path = paths.pop()
            for rank in path[-1].ranks:
                wait = None if rank in seen else self._wait_of(rank)
                seen.add(rank)
                if wait is None or wait.meeting == path[-1].meeting:
                    continue
                if own.arrival.rank in wait.ranks and wait.meeting != own.meeting:
                    return wait.arrival
                paths.append([*path, wait])
        return None

    def _wait_of(self, rank: int) -> _Wait | None:
        """Return the meeting that a rank waits in; None where it has told of none, or that one is over: all have come."""
        found = self._store.compare_set(f"{self._key}/{rank}", "", "").decode()
        if not found:
            return None
        meeting, ranks, arrival = json.loads(found)
        come, _, number = meeting.rpartition("/")
        is_over = self._store.add(come, 0) >= len(ranks) * (int(number) + 1)
        return None if is_over else _Wait(meeting, tuple(ranks), Arrival(*arrival))
