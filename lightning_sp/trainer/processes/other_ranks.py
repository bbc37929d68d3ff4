"""The end of a script whose rank 0 is done: it waits for the ranks that it has started, and fails where one of them has.

A rank may be at work when rank 0 has ended, in a hook at the end of training say. Lightning's script goes then, with code 0: what the rank
says is lost, and who started the script takes the run for a good one. One that does not end is ended, after it has written its lines.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

# When a line says that a rank is late, and how long one that is ended writes its lines.
_SAID_S, _WRITES_S = 10.0, 3.0
_POLL_S = 0.05
# Of this process, which starts ranks once.
_started: list[subprocess.Popen[Any]] = []
_late_s = 300.0
_tells: list[Callable[[], None]] = []


def wait_at_exit(ranks: Sequence[subprocess.Popen[Any]], *, late_s: float, tell: Callable[[], None]) -> None:
    """Wait for ranks 1, 2, ... when this script ends, unless `wait_no_more` is called before.

    Args:
        ranks: their processes.
        late_s: how long a rank may be later than this one. Past it, it is ended.
        tell: tells ranks that still run that this one's script is over.
    """
    global _late_s
    _started[:], _late_s, _tells[:] = ranks, late_s, [tell]


def wait_no_more() -> None:
    """Let the script end at once: its own run has failed, and the other ranks end with it."""
    _started.clear()


@atexit.register
def _wait() -> None:
    # An error outside of a run has ended the script: Python keeps what it has printed.
    if not _started or getattr(sys, "last_type", None) is not None:
        return
    began, said = time.monotonic(), False
    while running := [rank for rank, each in enumerate(_started, 1) if each.poll() is None]:
        if any(each.poll() for each in _started):
            break  # the others would wait for it, and end when this process has
        late_s = time.monotonic() - began
        if late_s > _POLL_S and _tells:
            _tells.pop()()
        if late_s > min(_SAID_S, _late_s / 2) and not said:
            said = True
            _say(f"rank 0 is done and waits for {_named(running)}, {_late_s:g} s at most")
        if late_s > _late_s:
            _say(
                f"rank 0 ends with code 1, and ends {_named(running)}: it went on for {_late_s:g} s after rank 0, and is here"
            )
            _end(running)
            break
        time.sleep(_POLL_S)
    failed = {rank: each.returncode for rank, each in enumerate(_started, 1) if each.poll() and rank not in running}
    for rank, code in failed.items():
        _say(f"rank 0 ends with code 1: rank {rank} has ended with code {code} after rank 0 was done")
    if failed or running:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # nothing else changes the code of a script that has ended


def _end(ranks: Sequence[int]) -> None:
    """End ranks. Each writes the lines that its threads are in, for it has a handler of SIGABRT (`faulthandler`) since its run began."""
    processes = [_started[rank - 1] for rank in ranks]
    for each in processes:
        with suppress(
            OSError, ValueError, ImportError
        ):  # no file of its memory; another system has no limits of others
            import resource  # noqa: PLC0415 - not on every system

            resource.prlimit(each.pid, resource.RLIMIT_CORE, (0, 0))
        each.send_signal(signal.SIGABRT)
    until = time.monotonic() + _WRITES_S
    while any(each.poll() is None for each in processes) and time.monotonic() < until:
        time.sleep(_POLL_S)
    for each in processes:
        each.kill()


def _named(ranks: Sequence[int]) -> str:
    return ", ".join(f"rank {rank} (process {_started[rank - 1].pid})" for rank in ranks)


def _say(text: str) -> None:
    sys.stderr.write(f"sequence_parallel: {text}\n")
