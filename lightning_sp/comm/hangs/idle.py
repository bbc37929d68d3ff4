"""For how long a process does nothing at all: neither its training thread, nor its other Python threads, nor the processes it has started.

    a rank downloads, tokenizes, builds a model     it uses CPU time, or a thread or a process of its own does: it works, however long it takes
    a rank sleeps, or waits for what does not come  nobody does: it is idle

Not counted are the threads that watch, those of native code (a backend's own loops wake up all the time), and other ranks.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Collection
from pathlib import Path

# Of a thread that waits and is woken up now and then, a look costs less, in seconds of CPU time.
_WOKEN_S = 0.0005
_OWN = "lightning_sp"
_PROC = Path("/proc")


class IdleTime:
    """How long nothing beside a thread has used any CPU time; a class because it remembers the last look.

    Args:
        thread: the one that is looked at elsewhere.
    """

    def __init__(self, thread: threading.Thread) -> None:
        self._thread = thread
        self._clocks: dict[int, float] | None = None
        self._ticks: dict[int, int] = {}
        self._moved_at = 0.0

    def forget(self) -> None:
        """Begin anew with the next look: the thread itself has moved."""
        self._clocks, self._moved_at = None, 0.0

    def look(self, ranks: Collection[int]) -> float:
        """Return for how many seconds nothing has moved, as far as looks tell: infinite where none has found a move.

        Args:
            ranks: process numbers that are other ranks.
        """
        is_first = self._clocks is None
        threads, processes = self._threads_moved(), self._processes_moved(ranks)
        if (threads or processes) and not is_first:
            self._moved_at = time.monotonic()
        return time.monotonic() - self._moved_at if self._moved_at else float("inf")

    def _threads_moved(self) -> bool:
        before, self._clocks = self._clocks or {}, {}
        for each in threading.enumerate():
            if each is not self._thread and not each.name.startswith(_OWN) and each.ident is not None:
                self._clocks[each.ident] = _cpu_s(each)
        return any(used - before.get(ident, 0.0) > _WOKEN_S for ident, used in self._clocks.items())

    def _processes_moved(self, ranks: Collection[int]) -> bool:
        before, self._ticks = self._ticks, _ticks_of_children(os.getpid(), ranks)
        return any(used != before.get(pid) for pid, used in self._ticks.items())


def _cpu_s(thread: threading.Thread) -> float:
    try:
        return time.clock_gettime(time.pthread_getcpuclockid(thread.ident or 0))
    except (OSError, AttributeError):  # it has ended; a system without these clocks
        return 0.0


def _ticks_of_children(pid: int, ranks: Collection[int]) -> dict[int, int]:
    """Return the CPU time of the processes that a process has started, and of theirs, in the kernel's ticks; empty without /proc."""
    found: dict[int, int] = {}
    waiting = [pid]
    while waiting:
        for each in _children(waiting.pop()):
            if each not in ranks and each not in found:
                found[each] = _ticks(each)
                waiting.append(each)
    return found


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for each in _PROC.glob(f"{pid}/task/*/children"):
        try:
            found += map(int, each.read_text().split())
        except OSError:
            continue
    return found


def _ticks(pid: int) -> int:
    try:
        fields = (_PROC / f"{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return sum(map(int, fields[11:15]))  # utime, stime and those of children that have ended
