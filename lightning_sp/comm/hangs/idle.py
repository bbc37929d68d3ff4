"""For how long a process does nothing at all: neither its training thread, nor its other threads, nor the processes it has started.

    a rank downloads, tokenizes, builds a model     it uses CPU time, or a thread or a process of its own does: it works, however long it takes
    a rank sleeps, or waits for what does not come  nobody does: it is idle

Not counted are the threads that watch, those of a backend, whose loops wake up all the time, and other ranks. A rank looks at itself in a run,
Python's threads alone; at another of its host behind that one's run, for no thread of ours is left there.
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
# Of gloo, of torch's store and NCCL's watchdog: the kernel's names for their threads.
_BACKENDS = ("gloo", "pt_")
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


class IdleProcess:
    """How long another process of this host has used no CPU time; a class because it remembers the last look."""

    def __init__(self) -> None:
        self._ticks: dict[int, int] = {}
        self._since: float | None = None

    def look(self, pid: int, ranks: Collection[int], waited_s: float) -> float:
        """Return for how many seconds nothing has moved, as far as looks tell.

        Args:
            pid: the process' number.
            ranks: process numbers that are other ranks.
            waited_s: for how long somebody waits for it: at the first look nothing is taken to have moved in that time.
        """
        before, self._ticks = self._ticks, _ticks_of_threads(pid) | _ticks_of_children(pid, ranks)
        now = time.monotonic()
        if self._since is None:
            self._since = now - waited_s
        elif any(used != before.get(each) for each, used in self._ticks.items()):
            self._since = now
        return now - self._since


def _ticks_of_threads(pid: int) -> dict[int, int]:
    """Return the CPU time of each thread of a process that is no backend's, in the kernel's ticks."""
    return {
        int(each.name): _ticks(each) for each in _PROC.glob(f"{pid}/task/*") if not _name(each).startswith(_BACKENDS)
    }


def _name(thread: Path) -> str:
    try:
        return (thread / "comm").read_text()
    except OSError:
        return ""


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
                found[each] = _ticks(_PROC / str(each), with_ended=True)
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


def _ticks(folder: Path, *, with_ended: bool = False) -> int:
    """Return the CPU time of a process or thread, with that of its children that have ended or without."""
    try:
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return sum(map(int, fields[11 : 15 if with_ended else 13]))  # utime, stime and those of children
