"""A thread that looks once a second what this rank's main thread does, and turns a hang into an error that names ranks, collectives and lines.

    main thread runs                        reads one entry of the store every other second
    it waits for 3 s, without any CPU time  says where; one of the ranks that wait compares, and asks those that do not
    all wait, and nothing travels           an error on all, within 10 s: `report.is_deadlock`
    some do not wait                        a warning with the stack of each at hang_s; the run ends at the collective's own limit, and the
                                            error says who was late, and where
    some do nothing before the first batch  the run ends at limit_s, with the stack of each; who works has the longer limit of a start
    none waits for another, but for         a warning with its stack at hang_s: no limit ends that
    something else, its loader say
    one is slow, so that all others wait    a warning that names it, and its lines: `slow_ranks`
    in every step, never for long

Owns: when a rank is told, and the end of a rank that nothing else ends. Not what is said (`report`), nor how (`meeting`).
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from threading import Event, Thread

import torch.distributed as dist

from lightning_sp.comm.groups import timeout_s
from lightning_sp.comm.hangs.idle import IdleProcess, IdleTime
from lightning_sp.comm.hangs.main_thread import MainThread, Place, place_here, place_of_error, user_threads
from lightning_sp.comm.hangs.meeting import Answer, Meeting
from lightning_sp.comm.hangs.raised import raised
from lightning_sp.comm.hangs.report import (
    Report,
    Seen,
    State,
    idle_ranks,
    is_deadlock,
    process_here,
    process_state,
    same_waits,
    told_deadlock,
    told_idle,
    told_late,
    told_places,
    told_stacks,
)
from lightning_sp.comm.hangs.side_channel import SideChannel, has_groups_of_others
from lightning_sp.comm.hangs.slow_ranks import SlowRanks
from lightning_sp.comm.hangs.traffic import Traffic, traffic

_LOOK_S = 1.0
# Looks at equal distances would find steps of a second in one and the same place.
_JITTER_S = 0.3
_LOOKS_PER_TALK = 2
_ASKS_AFTER_S = 3.0
# A rank that is told of the end may end by itself, as one whose connections break: it then raises, and its script may clean up.
_FIRST_GRACE_S, _GRACE_S = 1.0, 5.0
_LATE_S = 3.0
# How long a rank that was lost waits for what the others say.
_LOST_S = 2.0
# How long a rank waits for the others to hear why it leaves.
STAYS_S = 2.5

log = logging.getLogger(__name__)


class RunWatch:
    """Watches one run of this rank, from the thread that makes it. A class because it lives as long as the run.

    Args:
        channel: to the other ranks.
        run: the how many-th of the world.
        hang_s: after which a rank that others wait for is named, with its stack.
        limit_s: after which one that does nothing ends the run, where collectives have longer.
        at: the stage and step.
        last: what is to be done before this thread ends the process.
    """

    def __init__(
        self,
        channel: SideChannel,
        *,
        run: int,
        hang_s: float,
        limit_s: float,
        at: Callable[[], str],
        last: Callable[[], None],
    ) -> None:
        self._channel, self._run, self._hang_s, self._limit_s = channel, run, hang_s, limit_s
        self._at, self._last = at, last
        self._rank = dist.get_rank()
        of_run = {"run": run, "rank": self._rank, "world": dist.get_world_size()}
        self._meeting = Meeting(channel, **of_run)
        self._slow_ranks = SlowRanks(channel, **of_run, hang_s=hang_s)
        self._main, self._process, self._number = MainThread(), process_here(), 0
        self._idle_time, self._idle_s = IdleTime(threading.current_thread()), 0.0
        self._behind: dict[int, IdleProcess] = {}
        self._store_holder: Seen | None = None
        self._processes: list[int] = []
        self._stopped, self._is_asked = Event(), False
        self._traffic: tuple[int, Traffic | None] = (-1, None)
        self._deadlock: tuple[int, ...] = ()
        self._warned, self._is_wait_told = -1, False
        self._end: tuple[float, Answer] | None = None
        self._meeting.begin(self._report(State.ELSEWHERE))
        self._thread = Thread(target=self._watch, name="lightning_sp hang watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End with the run, which has ended as it should."""
        if not self._stopped.is_set():
            self._stopped.set()
            self._thread.join(_LOOK_S)
            self._meeting.step_down()
            self._meeting.acknowledge()
            self._meeting.tell(self._report(State.ENDED, why="has ended its run, without an error"))

    def leave(self, error: BaseException, *, is_lost: bool) -> str:
        """Tell the other ranks of the error that ends this one's run, and return what they say of their own; empty for nothing.

        Args:
            error: what was raised.
            is_lost: it is of a message between ranks: the reason is another rank's.
        """
        if self._stopped.is_set():
            return ""
        self._stopped.set()
        self._meeting.acknowledge()
        place = place_of_error(error)
        why = self._lost(place) if is_lost else self._raised(error, place)
        self._stay()
        return why

    def end_of_world(self) -> str:
        """Tell the other ranks that this thread destroys the groups of a run in progress, and return it; empty if the run has ended."""
        if self._stopped.is_set():
            return ""
        self._stopped.set()
        self._meeting.acknowledge()
        place = place_here()
        why = f"has destroyed its process groups in the run, in {place.line or place.stack[-1]}"
        self._tell_end(why, place)
        self._stay()
        return f"{why}, at {self._where()}"

    def _stay(self) -> None:
        """Let the others hear why this rank leaves: the store may end with it, or they may be ended by whoever has started them."""
        self._meeting.wait_for_all(STAYS_S)

    def _raised(self, error: BaseException, place: Place) -> str:
        """Tell the others of an error of this rank's own."""
        why = raised(error, place)
        self._tell_end(why, place)
        return ""

    def _tell_end(self, why: str, place: Place) -> None:
        self._meeting.tell(self._report(State.ENDED, place, why=why))
        if not self._channel.silent_s:
            self._meeting.end(f"rank {self._rank} {why}, at {self._where()}")

    # ---- the thread

    def _watch(self) -> None:
        looks, random = 0, Random(self._rank)  # the user's own generators are left alone
        while not self._stopped.wait(_LOOK_S + random.uniform(-_JITTER_S, _JITTER_S)):
            looks += 1
            self._main.look()
            if self._store_holder is None and not self._channel.silent_s:  # rank 0 may begin later than this one
                self._store_holder = next(iter(self._meeting.reports([0])), None)
            place = self._main.place() if self._main.blocked_s >= _ASKS_AFTER_S or self._is_asked else None
            waits = place is not None and bool(place.collective) and self._main.blocked_s >= _ASKS_AFTER_S
            self._look_whether_idle(waits=waits)
            if not waits:
                self._meeting.step_down()
            if waits or self._is_asked or looks % _LOOKS_PER_TALK == 0:
                self._talk(place, waits=waits)
            if self._end is not None:
                self._end_if_due(waits=waits)
            elif place is not None and not waits and not self._is_asked:
                self._warn_of_other_wait(place)
            if self._end is None and timeout_s() <= self._limit_s:  # the first batch has come to all
                self._warn_of_slow_ranks(place)

    def _warn_of_slow_ranks(self, place: Place | None) -> None:
        if told := self._slow_ranks.look(place or self._main.place()):
            log.warning(f"sequence_parallel: {told}")

    def _look_whether_idle(self, *, waits: bool) -> None:
        """Note for how long this process has done nothing, in the start of a run, in which one that works has longer than the limit."""
        if waits or self._main.blocked_s < _ASKS_AFTER_S or not self._main.has_clock or timeout_s() <= self._limit_s:
            self._idle_time.forget()
            self._idle_s = 0.0
        else:
            self._idle_s = min(self._main.blocked_s, self._idle_time.look(self._ranks_here()))

    def _ranks_here(self) -> list[int]:
        """Return the processes of the world's ranks: rank 0 may have started the others."""
        if len(self._processes) < dist.get_world_size():
            self._processes = [each.process[0] for each in self._meeting.reports() if each.report is not None]
        return self._processes

    def _talk(self, place: Place | None, *, waits: bool) -> None:
        state = State.WAITS if waits else State.ELSEWHERE
        answer = self._meeting.talk(None if place is None else self._report(state, place), waits=waits)
        if self._stopped.is_set():
            return
        if answer is None:
            self._warn_of_store(waits=waits)
            return
        self._is_asked = answer.is_asked
        if answer.why and self._end is None:
            self._end = time.monotonic(), answer
            if waits:
                # Before the others know that it knows: whoever has started the ranks ends all of them with the first one.
                log.warning(f"sequence_parallel: rank {self._rank} waits for ranks that have ended: {answer.why}")
            self._meeting.acknowledge()
        if answer.seen is not None:
            self._compare(answer.seen)

    def _compare(self, seen: Sequence[Seen]) -> None:
        before, self._deadlock = self._deadlock, ()
        if is_deadlock(seen, self._run):
            self._deadlock = same_waits(seen)
            if self._deadlock == before:
                self._meeting.end(told_deadlock(seen), last=[each.rank for each in seen if each.is_stuck])
            return
        if self._limit_s < timeout_s():
            seen = [self._with_idle_time(each) for each in seen]
            idle = idle_ranks(seen, self._limit_s) if self._main.blocked_s >= self._limit_s else []
            if idle:
                self._meeting.end(told_idle(seen, self._rank, self._limit_s), last=idle)
                return
        words = told_late(seen, self._rank)
        self._meeting.say_late(words)
        self._warn(words)

    def _with_idle_time(self, seen: Seen) -> Seen:
        """Return what is seen of a rank, with how long it has done nothing where it is still behind a run before this one, on this host."""
        own = seen.report
        is_behind = own is not None and own.state is State.ENDED and own.run < self._run
        if own is None or not is_behind or process_state(own.process) in ("", "X"):
            return seen
        # It is looked at from the first comparison on, some seconds behind this rank's arrival.
        waited_s = min(self._main.blocked_s, self._limit_s / 2)
        idle_s = self._behind.setdefault(seen.rank, IdleProcess()).look(own.process[0], self._ranks_here(), waited_s)
        return replace(seen, report=replace(own, idle_s=idle_s))

    def _warn_of_store(self, *, waits: bool) -> None:
        if waits and self._channel.silent_s:
            self._warn(f"rank {self._rank} has waited for {self._main.blocked_s:.0f} s; {self._store_words()}")

    def _warn_of_other_wait(self, place: Place) -> None:
        """Say once where this rank waits for something that is no other rank, a process of its loader say, while no rank waits for it.

        A wait that looks up every few seconds, as a loader's does, is one wait.
        """
        still_s = self._main.still_s
        if still_s >= self._hang_s and not self._is_wait_told:
            own = replace(self._report(State.ELSEWHERE, place), since_s=still_s)
            told = told_stacks([Seen(rank=self._rank, report=own, age_s=0.0, silent_s=0.0)])
            log.warning(f"sequence_parallel: {told}\nIt waits there, and no rank for it yet: no time limit ends that.")
        self._is_wait_told = still_s >= self._hang_s

    def _warn(self, words: str) -> None:
        if self._main.blocked_s >= self._hang_s and self._warned != self._main.moves:
            self._warned = self._main.moves
            log.warning(f"sequence_parallel: {words}\nThe run goes on if it ends within timeout_s={timeout_s():g} s.")

    def _end_if_due(self, *, waits: bool) -> None:
        """End this process, where nothing else does: its main thread is in a wait that cannot be interrupted, or does not come back."""
        assert self._end is not None
        since, answer = self._end
        due = time.monotonic() - since >= (_FIRST_GRACE_S if answer.goes_first else _GRACE_S)
        # It may write a file, say, and has its time: as much as others wait for it, and a moment more.
        is_late = self._main.still_s >= timeout_s() + _LATE_S or self._idle_s >= self._limit_s
        if due if waits else is_late:
            moves = self._main.moves
            self._main.look()
            if self._stopped.is_set() or (waits and self._main.moves != moves):
                return  # it has come back since
            sys.stderr.write(f"sequence_parallel: rank {self._rank} ends. {answer.why}\n")
            sys.stderr.flush()
            sys.stdout.flush()
            self._last()
            os._exit(1)

    # ---- what is said

    def _report(self, state: State, place: Place | None = None, *, why: str = "") -> Report:
        self._number += 1
        return Report(
            rank=self._rank,
            run=self._run,
            number=self._number,
            moves=self._main.moves,
            at=self._where(),
            state=state,
            since_s=self._main.blocked_s if state is State.WAITS else self._main.still_s,
            idle_s=self._idle_s,
            collective=place.collective if place is not None else "",
            line=place.line if place is not None else "",
            stack=place.stack if place is not None else (),
            is_quiet=state is State.WAITS and self._is_quiet(),
            process=self._process,
            why=why,
        )

    def _is_quiet(self) -> bool:
        """Return whether nothing has come or gone since the first report of this wait."""
        moves, before = self._traffic
        if has_groups_of_others(self._channel.port):
            return False  # a wait may be for a process that is no rank of this world, an inference server's say
        if user_threads():
            return False
        now = traffic(self._channel.port)
        if moves != self._main.moves or before is None:
            self._traffic = self._main.moves, now
            return False
        return now is not None and now.is_quiet_since(before)

    def _where(self) -> str:
        try:
            return self._at()
        except Exception:  # the main thread changes what it reads
            return "a step"

    def _store_words(self) -> str:
        words = f"the store of the ranks, in rank 0's process or its launcher's, has not answered for {self._channel.silent_s:.0f} s"
        if self._store_holder is None:
            return words
        return f"{words}; {told_places([replace(self._store_holder, silent_s=self._channel.silent_s)])}"

    def _lost(self, place: Place) -> str:
        """Return why this rank has lost another one, and see that ranks that still run know it."""
        where = place.collective or place.stack[-1]
        why = f"has lost another rank in {where}{f', from {place.line}' if place.line else ''}"
        if self._end is not None:
            return self._end[1].why
        if not self._channel.silent_s:
            self._meeting.tell(self._report(State.LOST, place, why=why))
        if self._channel.silent_s:
            return self._store_words()
        if told := self._meeting.why():
            return told
        known, until = self._gone() or self._meeting.late(), time.monotonic() + _LOST_S
        while not known and time.monotonic() < until:
            time.sleep(0.1)
            known = self._meeting.why() or self._gone()
        return self._meeting.end(known) if known else ""

    def _gone(self) -> str:
        """Return which ranks have ended without a word, or how all have lost one another; empty for neither."""
        reports = self._meeting.reports()
        seen = [each for each in reports if each.is_in(self._run)]
        # One that has ended an earlier run well, and has ended since.
        before = [
            replace(each, report=replace(each.report, state=State.ELSEWHERE))
            for each in reports
            if each.report is not None and each not in seen
        ]
        gone = [each for each in seen + before if not each.has_left and process_state(each.process) == "X"]
        if gone:
            return told_places(gone)
        return told_deadlock(seen) if all(each.has_left for each in seen) else ""
