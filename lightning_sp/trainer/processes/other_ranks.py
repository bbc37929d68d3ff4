"""The end of a script whose rank 0 is done: it waits for the ranks that it has started, and fails where one of them has.

A rank may be at work when rank 0 has ended, in a hook at the end of training say. Lightning's script goes then, with code 0: what the rank
says is lost, and who started the script takes the run for a good one.
"""

from __future__ import annotations

import atexit
import logging
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

# How long a rank may be later than rank 0, and when a line says that it is.
_LATE_S, _SAID_S = 300.0, 10.0
_POLL_S = 0.05
# Of this process, which starts ranks once.
_started: list[subprocess.Popen[Any]] = []


def wait_at_exit(ranks: Sequence[subprocess.Popen[Any]]) -> None:
    """Wait for ranks 1, 2, ... when this script ends, unless `wait_no_more` is called before."""
    _started[:] = ranks


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
        if late_s > _SAID_S and not said:
            said = True
            _say(f"rank 0 is done and waits for {_named(running)}, {_LATE_S:.0f} s at most")
        if late_s > _LATE_S:
            _say(f"rank 0 ends with code 1: {_named(running)} went on for {_LATE_S:.0f} s after it")
            break
        time.sleep(_POLL_S)
    failed = {rank: each.returncode for rank, each in enumerate(_started, 1) if each.poll()}
    for rank, code in failed.items():
        _say(f"rank 0 ends with code 1: rank {rank} has ended with code {code} after rank 0 was done")
    if failed or running:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # nothing else changes the code of a script that has ended


def _named(ranks: Sequence[int]) -> str:
    return ", ".join(f"rank {rank} (process {_started[rank - 1].pid})" for rank in ranks)


def _say(text: str) -> None:
    sys.stderr.write(f"sequence_parallel: {text}\n")
