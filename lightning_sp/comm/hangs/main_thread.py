"""What a rank's training thread does, seen from another thread: whether it moves, in which collective it waits, on which line of the user's.

A thread that waits for other ranks uses no CPU time at all. So one look at its clock tells that it has not moved since the last one, and
nothing is counted on its own way.
"""

from __future__ import annotations

import os
import site
import sys
import sysconfig
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType

import torch

# Of a thread that runs, a look costs more than this, in seconds of its own CPU time.
_MOVED_S = 0.0005
# Looks that are farther apart say nothing: this process was stopped, or had no CPU.
_GAP_S = 10.0
_STACK_LINES = 12

_PACKAGE = str(Path(__file__).parents[2]) + os.sep
_TORCH = str(Path(torch.__file__).parent) + os.sep
_COMM = os.path.join(_PACKAGE, "comm") + os.sep
# Where ranks meet before a collective in a trial: that is told as the collective.
_MEETINGS = os.path.join(_COMM, "meetings", "failing_together.py")
_INSTALLED = tuple(
    {
        os.path.join(each, "")
        for each in (
            *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
            *site.getsitepackages(),
            site.getusersitepackages(),
            _PACKAGE,
        )
    }
)
# Where torch itself waits for other ranks.
_TORCH_WAITS = tuple(
    os.path.join(_TORCH, *each.split("/"))
    for each in (
        "distributed/distributed_c10d.py",
        "distributed/_functional_collectives.py",
        "distributed/fsdp/_fully_shard/_fsdp_collectives.py",
    )
)
# What stands between a collective's call and its C++.
_BETWEEN = (
    *(
        os.path.join(_TORCH, *each.split("/"))
        for each in (
            "_ops.py",
            "_library/autograd.py",
            "utils/_contextlib.py",
            "distributed/c10d_logger.py",
            "_dynamo/eval_frame.py",
            "_compile.py",
            "overrides.py",
        )
    ),
    threading.__file__,
    # Asks of each collective whether the global view carries it.
    os.path.join(_PACKAGE, "global_view", "user_functions", "collectives.py"),
)

Line = tuple[str, int, str]  # file, number, function


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a thread is.

    Args:
        collective: in which collective it waits, and who called that; empty if in none.
        line: the innermost line of the user's.
        stack: the innermost lines, the last one where it is.
    """

    collective: str
    line: str
    stack: tuple[str, ...]


class MainThread:
    """The thread that made this object, as a thread of our own looks at it. A class because it remembers the last look.

    Attributes:
        moves: how many looks have found that it had moved: equal numbers are of one and the same wait.
    """

    def __init__(self) -> None:
        self._thread = threading.current_thread()
        # A system without these clocks has none of /proc either: nothing is then said of a wait before its time limit.
        clock = getattr(time, "pthread_getcpuclockid", None)
        self._clock = None if clock is None else clock(self._thread.ident)
        self._cpu_s, self._lines = -1.0, 0
        self.moves = 0
        self._looked = self._blocked_since = self._still_since = time.monotonic()

    def look(self) -> None:
        """Note whether the thread has moved since the last look."""
        now, cpu_s, before = time.monotonic(), self._used_s(), self._cpu_s
        gap, self._looked = now - self._looked, now
        if self._clock is not None and cpu_s - before < _MOVED_S and gap < _GAP_S:
            return
        self._cpu_s, lines = cpu_s, self._token()
        if self._clock is not None or lines != self._lines or gap >= _GAP_S:
            self.moves, self._blocked_since = self.moves + 1, now
        if lines != self._lines or gap >= _GAP_S:
            self._lines, self._still_since = lines, now

    @property
    def has_clock(self) -> bool:
        """Return whether the system tells a thread's CPU time: without it one that computes on a line seems to wait there."""
        return self._clock is not None

    @property
    def blocked_s(self) -> float:
        """Return for how long it has waited for anything, without any CPU time."""
        return self._looked - self._blocked_since

    @property
    def still_s(self) -> float:
        """Return for how long it has been on the same lines."""
        return self._looked - self._still_since

    def place(self) -> Place:
        """Return where it is."""
        return place_of(_lines_from(self._frame()))

    def _frame(self) -> FrameType | None:
        return sys._current_frames().get(self._thread.ident or 0)

    def _used_s(self) -> float:
        # The clock of a thread that has ended is no clock.
        return time.clock_gettime(self._clock) if self._clock is not None and self._thread.is_alive() else self._cpu_s

    def _token(self) -> int:
        token, frame = 0, self._frame()
        while frame is not None:
            token, frame = hash((token, id(frame.f_code), frame.f_lasti)), frame.f_back
        return token


def user_threads() -> bool:
    """Return whether another thread than the main one runs a user's code: what ranks wait for may be its affair."""
    main = threading.main_thread().ident
    others = [frame for ident, frame in sys._current_frames().items() if ident != main]
    return any(_is_users(file) for frame in others for file, _, _ in _lines_from(frame))


def place_of_error(error: BaseException) -> Place:
    """Return where an error was raised; its line is that of the caller's script where no line of the user's is nearer."""
    around = list(_lines_from(sys._getframe(1)))
    return place_of([*reversed(list(_lines_of(error.__traceback__))), *around])


def place_here() -> Place:
    """Return where the calling thread is."""
    return place_of(_lines_from(sys._getframe(1)))


def place_of(lines: Iterable[Line]) -> Place:
    """Return the place of a stack, whose innermost line comes first."""
    stack = list(lines)
    line = next((each for each in stack if _is_users(each[0])), None)
    shown = stack[:_STACK_LINES]
    return Place(
        collective=_collective(stack),
        line="" if line is None else told_line(line),
        stack=tuple(told_line(each) for each in reversed(shown)),
    )


def _collective(stack: list[Line]) -> str:
    inner: Line | None = None
    outer: Line | None = None
    met: Line | None = None
    for each in stack:
        if each[0] == _MEETINGS:
            met = each
        elif each[0].startswith(_COMM) or each[0] in _TORCH_WAITS:
            inner, outer = inner or each, each
        elif not _is_between(each, inner is not None):
            inner, outer = inner or met, outer or met
            if inner is None or outer is None:
                return ""
            own = inner[2] if inner[2] == outer[2] else f"{outer[2]} ({inner[2]})"
            return f"{own}, called in {told_line(each)}"
    return "" if inner is None else inner[2]


def _is_between(line: Line, in_collective: bool) -> bool:
    """Return whether a line is only how a call came to its collective: of torch, or of a mode that sees all calls."""
    return line[0] in _BETWEEN or line[2] == "__torch_function__" or (in_collective and line[0].startswith(_TORCH))


def _is_users(file: str) -> bool:
    if file.startswith("<"):  # made by an import, a dataclass or torch.fx, or typed by the user
        return file.startswith(("<stdin", "<ipython"))
    return not file.startswith(_INSTALLED) and "torchinductor_" not in file


def told_line(line: Line) -> str:
    """Return a line of a stack in short: its file, number and function."""
    file, number, function = line
    inside = next((each for each in sorted(_INSTALLED, key=len, reverse=True) if file.startswith(each)), None)
    if file.startswith(_PACKAGE):
        file = os.path.relpath(file, os.path.dirname(os.path.dirname(_PACKAGE)))
    elif inside is not None:
        file = file[len(inside) :]
    elif file.startswith(os.getcwd() + os.sep):
        file = os.path.relpath(file)
    return f"{file}:{number} in {function}"


def _lines_from(frame: FrameType | None) -> Iterator[Line]:
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name
        frame = frame.f_back


def _lines_of(traceback: TracebackType | None) -> Iterator[Line]:
    while traceback is not None:
        code = traceback.tb_frame.f_code
        yield code.co_filename, traceback.tb_lineno, code.co_name
        traceback = traceback.tb_next
