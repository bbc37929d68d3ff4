"""The process that started a rank: when it has ended, by whatever signal, a rank in a run ends too.

A rank that waits for one that is gone, or hangs in its user's code, would otherwise stay, with its memory and its device. Behind its run
the kernel ends it (SIGTERM), for no thread of ours is left: rank 0 waits for it at the end of the script, unless it has failed.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread

# Set by `launchers.ScriptLauncher` for the ranks that it starts: its own process.
STARTED_BY = "LIGHTNING_SP_STARTED_BY"
# Set by it, too: "main" where its main thread did, whose end is that of the process.
STARTED_IN = "LIGHTNING_SP_STARTED_IN"
# Set by it, too: what the ranks of its run have alike, and those of another run on one port do not.
RUN = "LIGHTNING_SP_RUN"
# A rank may notice by itself that another is gone, and say so: it has this long.
GRACE_S = 3.0
_POLL_S = 0.5
_PR_SET_PDEATHSIG = 1


# Of the ranks that this process has started, the last ones: its environment is the user's.
_started: list[str] = []


def note_started(run: str) -> None:
    """Note the run of the ranks that this process starts, empty where others start ranks of it too."""
    _started[:] = [run]


def run_of(environment: Mapping[str, str]) -> str:
    """Return the run of this rank, by who has started it or what it has started; empty for none that is known."""
    return _started[0] if _started else environment.get(RUN, "")


class ParentWatch:
    """Ends this process when its launcher has ended; a class because a run starts and stops it."""

    def __init__(self) -> None:
        # They hold locks: a strategy is copied before its run.
        self._stopped: Event | None = None
        self._thread: Thread | None = None
        self._ends_with_parent = False

    def start(self, environment: Mapping[str, str]) -> None:
        """Begin, if a launcher has started this rank: Lightning's, torchrun or `multiprocessing`."""
        self._join()
        pid = launcher_pid(environment)
        if pid is not None and environment.get(STARTED_IN) == "main" and environment.get(STARTED_BY) == str(pid):
            self._ends_with_parent = True
            _end_with_parent(0)
        if pid is not None:
            self._stopped = Event()
            self._thread = Thread(
                target=_watch, args=(pid, self._stopped), name="lightning_sp launcher watch", daemon=True
            )
            self._thread.start()

    def stop(self) -> None:
        """End with the run: what a script does after it is its own, for as long as the one that has started it is there."""
        self._join()
        if self._ends_with_parent:
            _end_with_parent(signal.SIGTERM)

    def _join(self) -> None:
        if self._stopped is not None and self._thread is not None:
            self._stopped.set()
            self._thread.join(_POLL_S)
            self._stopped = self._thread = None


def launcher_pid(environment: Mapping[str, str]) -> int | None:
    """Return the process that started this rank; None where a shell or a scheduler did, which may end before it."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        return parent.pid
    if "TORCHELASTIC_RUN_ID" in environment:
        return os.getppid()
    # What rank 0's script starts besides, an evaluation say, inherits its environment, and may outlive it.
    pid = environment.get(STARTED_BY, "") if environment.get("LOCAL_RANK", "0") != "0" else ""
    return int(pid) if pid.isdigit() and int(pid) != os.getpid() else None


def _end_with_parent(signum: int) -> None:
    """Let the kernel send a signal to this process when the thread that started it ends, 0 for none. Linux alone can."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signum))


def _watch(pid: int, stopped: Event) -> None:
    if _wait(pid, stopped) and not stopped.wait(GRACE_S):
        sys.stderr.write(
            f"sequence_parallel: process {os.getpid()} ends, for process {pid}, which started it, has ended\n"
        )
        sys.stderr.flush()
        os._exit(1)


def _wait(pid: int, stopped: Event) -> bool:
    """Return True when a process has ended, False when the watch was stopped."""
    while not stopped.wait(_POLL_S):
        if not _is_alive(pid):
            return True
    return False


def is_stopped(pid: int) -> bool:
    """Return whether a process of this host is stopped: by SIGSTOP, Ctrl-Z or a debugger."""
    try:
        return _state(pid) in "Tt"
    except OSError:
        return False


def _state(pid: int) -> str:
    """Return the kernel's letter for what a process does."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def _is_alive(pid: int) -> bool:
    """Return whether a process runs. One that has ended, and that nobody has waited for, is a zombie."""
    try:
        return _state(pid) not in "ZX"
    except FileNotFoundError:
        if Path("/proc/self/stat").exists():
            return False
    except OSError:
        return True
    try:  # a system without /proc
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
