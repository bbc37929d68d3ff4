"""The ranks that all distributed tests run on: what one call leaves behind is not the next one's answer."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from threading import Timer

import pytest

from lightning_sp import testing
from lightning_sp.testing import RankPool
from tests.testing_ranks import Tell, hanging_ranks, late, leave, rank_of, seed_once

ROOT = Path(__file__).parents[1]


def test_a_call_that_failed_ends_the_pool():
    with RankPool(2, others_s=0.5) as pool:
        assert pool.run(rank_of) == [0, 1]
        with pytest.raises(
            RuntimeError,
            match=r"rank 1 of 2 failed first(.|\n)*ValueError: boom(.|\n)*no answer from ranks \[0\] within",
        ):
            pool.run(late, 1, 1.0)
        # Rank 0 would answer now.
        time.sleep(1)
        with pytest.raises(RuntimeError, match=r"an earlier call ended this pool(.|\n)*ValueError: boom"):
            pool.run(rank_of)


def test_a_calls_environment_ends_with_it(pools):
    assert pools(2).run(seed_once) + pools(2).run(seed_once) == [None] * 4


def test_a_rank_that_does_not_answer_ends_the_pool(monkeypatch):
    monkeypatch.setattr(testing, "_START_S", 0.5)
    with RankPool(1, timeout_s=0.5) as pool:
        with pytest.raises(RuntimeError, match=r"no answer from ranks \[0\] within 1 s"):
            pool.run(late, -1, 60.0)
        for process in pool._processes:
            process.join(5)
            assert process.exitcode == -signal.SIGKILL


@pytest.mark.parametrize("leaving", [(0,), (0, 1)])
def test_ranks_that_end_in_a_call_end_the_pool_long_before_its_limit(leaving):
    began_s = time.monotonic()
    with RankPool(2, timeout_s=300, others_s=0.5) as pool:
        which = re.escape(str([*leaving]))
        with pytest.raises(RuntimeError, match=rf"^ranks {which} have ended without an answer, with exit codes \[7"):
            pool.run(leave, leaving)
    assert time.monotonic() - began_s < 100


def test_an_interrupted_call_ends_the_pool():
    with RankPool(1) as pool:
        assert pool.run(rank_of) == [0]
        before = signal.signal(signal.SIGUSR1, interrupt)
        try:
            Timer(0.5, os.kill, (os.getpid(), signal.SIGUSR1)).start()
            with pytest.raises(KeyboardInterrupt):
                pool.run(late, -1, 60.0)
        finally:
            signal.signal(signal.SIGUSR1, before)
        with pytest.raises(RuntimeError, match="an earlier call ended this pool, make another: it was interrupted"):
            pool.run(rank_of)


def interrupt(number, frame):
    raise KeyboardInterrupt


SCRIPT = """
from tests.testing_ranks import hanging_ranks

if __name__ == "__main__":
    hanging_ranks(print)
"""


@pytest.mark.slow
def test_no_rank_and_no_server_outlives_a_process_that_was_killed(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-u", str(script)]
    with subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True, stdout=subprocess.PIPE
    ) as started:
        try:
            assert started.stdout is not None
            processes = {int(word) for word in started.stdout.readline().split()}
            assert len(processes) == 4, "three ranks and their server"
            ends_with(processes, lambda: started.kill())
        finally:
            started.kill()


@pytest.mark.slow
def test_no_rank_outlives_a_process_that_was_terminated():
    context = multiprocessing.get_context("forkserver")
    told = context.SimpleQueue()
    # Not daemonic: it starts ranks. They have the server of this process, which stays.
    started = context.Process(target=hanging_ranks, args=(Tell(told),))
    started.start()
    try:
        processes = {int(line.split()[0]) for line in told.get()}
        assert len(processes) == 3
        ends_with(processes, started.terminate)
    finally:
        started.kill()
        started.join()


def ends_with(processes: set[int], end) -> None:
    """Assert that the processes live, and live no more a few seconds after `end` was called."""
    time.sleep(0.5)  # the ranks hang by now
    assert all(is_alive(each) for each in processes)
    end()
    until = time.monotonic() + 10
    while (alive := [each for each in processes if is_alive(each)]) and time.monotonic() < until:
        time.sleep(0.05)
    assert not alive


def is_alive(process: int) -> bool:
    """Return whether a process runs; one that has ended and that nobody has waited for does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
