"""The time that a process has to end in after a signal: past it, it says where it still is, and ends.

A handler of Python's runs between two lines of Python, and a rank that waits in a collective is in one for long. A thread hears of the signal.
"""

from __future__ import annotations

import multiprocessing.util
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass

_BEGIN = 0  # no signal has this number


@dataclass(frozen=True, kw_only=True)
class Limit:
    """How a process ends that was told to.

    Args:
        within_s: how long it has.
        code: with which it ends past that.
        at: says where it is.
        last: is called before it ends.
    """

    within_s: float
    code: int
    at: Callable[[], str]
    last: Callable[[], None] = lambda: None

    @property
    def said(self) -> str:
        """What a process says that ends."""
        told = f"sequence_parallel: process {os.getpid()} was told to end"
        if not self.within_s:
            return (
                f"{told} at {self.at()}, before the first batch of its run: it ends now, with code {self.code}, and nothing is lost that a "
                "checkpoint would have"
            )
        return (
            f"{told} {self.within_s:g} s ago and is still at {self.at()}: it ends now, with code {self.code}, and what it was about to save is "
            f"not complete; resume from the checkpoint before (preemption_limit_s={self.within_s:g} is the limit: a longer one needs as long "
            "between SIGTERM and SIGKILL)"
        )


class TimeLimit:
    """A process' time after a signal. A class because a run starts and stops it, and a thread measures it."""

    def __init__(self) -> None:
        # A strategy is copied before its run, which neither of the two can be.
        self._tells: socket.socket | None = None
        self._stopped: threading.Event | None = None
        self._thread: threading.Thread | None = None
        self._wakes = False

    def start(self, limit: Limit, signals: Collection[int]) -> None:
        """Begin to listen; the time itself begins with the first of the signals."""
        self.stop()
        hears, self._tells = socket.socketpair()
        self._tells.setblocking(False)
        self._stopped = threading.Event()
        if threading.current_thread() is threading.main_thread():
            self._wake_by_signals(self._tells.fileno())
        told = limit, hears, {_BEGIN, *signals}, self._stopped
        self._thread = threading.Thread(target=_wait, args=told, name="lightning_sp time limit", daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """Begin the time now, for another rank was told."""
        if self._tells is not None:
            with suppress(BlockingIOError):  # full of what says the same
                self._tells.send(bytes([_BEGIN]))

    def deafen(self) -> None:
        """Hear of no further signal; a time that has begun goes on."""
        if self._wakes and self._tells is not None:
            other = signal.set_wakeup_fd(-1)
            if other not in (-1, self._tells.fileno()):
                signal.set_wakeup_fd(other)
            self._wakes = False

    def stop(self) -> None:
        """End with the run: what a script does after it is its own."""
        tells, stopped, thread = self._tells, self._stopped, self._thread
        if tells is None or stopped is None:
            return
        self.deafen()
        # Before it is closed: the handler of a signal that comes here, as torchrun's does behind another rank's error, begins the time.
        self._tells = self._stopped = self._thread = None
        stopped.set()
        tells.close()
        if thread is not None:
            thread.join(1.0)  # it has nothing left to do: a run leaves no thread behind

    def _wake_by_signals(self, number: int) -> None:
        """Let the interpreter write the number of each signal as it arrives, unless another loop has that (asyncio): it goes without."""
        other = signal.set_wakeup_fd(number, warn_on_full_buffer=False)
        if other != -1:
            signal.set_wakeup_fd(other)
            return
        self._wakes = True
        # A loader's worker has the same handlers, and its signals are no affair of this process.
        multiprocessing.util.register_after_fork(self, _listen_no_more)


def _listen_no_more(_: TimeLimit) -> None:
    signal.set_wakeup_fd(-1)


def _wait(limit: Limit, hears: socket.socket, signals: set[int], stopped: threading.Event) -> None:
    # Open until the end: what is written to nobody would be an error of the one that writes.
    with hears:
        heard = b""
        while not signals & set(heard):
            heard = hears.recv(64)
            if not heard:
                return
        if stopped.wait(limit.within_s):
            return
    sys.stderr.write(f"{limit.said}\n")
    sys.stderr.flush()
    limit.last()
    os._exit(limit.code)
