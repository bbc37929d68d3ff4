"""Runs a script with a fault as its user would, and notes what the user sees and when, and what is left.

python -m tests.faults_run.runs sleeps SIGKILL
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

from tests.faults_run.script import RESTARTED, SLOW

ROOT = Path(__file__).parents[2]
BY_LIGHTNING = [sys.executable, "-W", "ignore"]
BY_TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
BY_TORCHRUN += ["--no-python", *BY_LIGHTNING]
# Lightning's word of a run that has begun from a checkpoint.
GOES_ON = "Restored all states from the checkpoint at"
_MARK = "FAULTS_RUN"
# What this package says, and not what torch or Lightning do: the error itself, a warning, the last word of a rank.
_NAMED = re.compile(
    r"(?:\[rank\d+\]: )?(?:lightning_sp\.errors\.SequenceParallelError|sequence_parallel): (?:rank|some|ranks)"
)


@dataclass(frozen=True)
class Outcome:
    """What became of a run.

    Attributes:
        lines: what the user saw, each with its seconds after the fault.
        ended_s: from the fault to the end of the last process that is not stopped.
        code: of the process that was started, None for one that did not end.
        processes: how many are left, and were killed by the test.
        shared_memory: what is left of it.
    """

    lines: list[tuple[float, str]]
    ended_s: float
    code: int | None
    processes: int
    shared_memory: list[str]

    @property
    def words(self) -> str:
        """What the user saw."""
        return "\n".join(line for _, line in self.lines)

    @property
    def named(self) -> list[tuple[float, str]]:
        """The lines in which this package names a rank, from the fault on: before it, one may wait for the other to start."""
        return [(seconds, line) for seconds, line in self.lines if seconds > -0.5 and _NAMED.match(line)]


def run(fault: str, limit_s: float | None = None, start_s: float = 180.0) -> Outcome:
    """Start the script by Lightning's launcher, or by torchrun, and return what became of it; processes that are left are killed.

    Args:
        fault: of `script`.
        limit_s: after the fault; None is 40, and as long as a start where ranks are started again, or one is only slow.
        start_s: until the fault.
    """
    if limit_s is None:
        limit_s = start_s if fault in (RESTARTED, SLOW) else 40.0
    mark, before = uuid.uuid4().hex, set(os.listdir("/dev/shm"))
    found: list[tuple[float, str]] = []
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, _MARK: mark, "FAULTS_FOLDER": folder, "GLOO_SOCKET_IFNAME": "lo"}
        command = [*(BY_TORCHRUN if fault == RESTARTED else BY_LIGHTNING), "-m", "tests.faults_run.script", fault]
        with subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, text=True
        ) as started:
            reader = Thread(target=_read, args=(started, found))
            reader.start()
            fault_at = _wait_for_fault(found, started, time.time() + start_s)
            while (_running(mark) or _state(started.pid) not in "TX") and time.time() < fault_at + limit_s:
                time.sleep(0.1)
            ended, code, left = time.time(), started.poll(), _marked(mark)
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            reader.join()
    # Semaphores are those of other programs: these ranks have no loader in processes of its own.
    memory = sorted(each for each in set(os.listdir("/dev/shm")) - before if not each.startswith("sem.mp-"))
    return Outcome([(at - fault_at, line) for at, line in found], ended - fault_at, code, len(left), memory)


def _read(started: subprocess.Popen[str], found: list[tuple[float, str]]) -> None:
    assert started.stdout is not None
    for line in started.stdout:
        found.append((time.time(), line.rstrip()))


def _wait_for_fault(found: list[tuple[float, str]], started: subprocess.Popen[str], until: float) -> float:
    while time.time() < until and started.poll() is None:
        if at := [float(line.split()[-1]) for _, line in found if line.startswith("fault at ")]:
            return at[0]
        time.sleep(0.1)
    return time.time()


def _running(mark: str) -> bool:
    """Return whether a process of a run has not ended and is not stopped."""
    return any(_state(pid) not in "TX" for pid in _marked(mark))


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0].replace("Z", "X")
    except OSError:
        return "X"


def _marked(mark: str) -> list[int]:
    """Return the processes that have the mark in their environment."""
    found = []
    for each in Path("/proc").glob("[0-9]*"):
        try:
            if f"{_MARK}={mark}".encode() in (each / "environ").read_bytes():
                found.append(int(each.name))
        except OSError:
            continue
    return found


if __name__ == "__main__":
    for name in sys.argv[1:]:
        outcome = run(name)
        left = f"left {outcome.processes} {outcome.shared_memory}"
        print(f"==== {name}: {outcome.ended_s:.1f} s, code {outcome.code}, {left}")
        for seconds, line in outcome.lines:
            if seconds > 0 and not re.match(r"\[rank\d\]:   ", line):
                print(f"{seconds:6.1f} {line}", flush=True)
