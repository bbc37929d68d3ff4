"""A process is idle where neither a thread of Python's beside the main one nor a process that it has started uses any CPU time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from lightning_sp.comm.hangs.idle import IdleProcess, IdleTime, _ticks_of_children
from lightning_sp.comm.hangs.report import Report, Seen, State, idle_ranks, told_idle

COMPUTES = "while True: pass"
SLEEPS = "import time; time.sleep(60)"


def _compute(stopped, name):
    def work():
        while not stopped.is_set():
            sum(range(10_000))

    thread = threading.Thread(target=work, name=name)
    thread.start()
    return thread


def test_a_thread_that_computes_is_work():
    idle, stopped = IdleTime(threading.current_thread()), threading.Event()
    assert idle.look([]) == float("inf")  # the first look compares with nothing
    thread = _compute(stopped, "download")
    idle.forget()
    idle.look([])
    time.sleep(0.1)
    assert idle.look([]) < 3600
    stopped.set()
    thread.join()


def _started_by_other_tests():
    """The ranks of their pools, say, which may end their work at any time."""
    return set(_ticks_of_children(os.getpid(), []))


@pytest.mark.parametrize("counted", [True, False])
def test_a_process_that_computes_is_work_unless_it_is_another_rank(counted):
    shell = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {COMPUTES!r}])"
    idle, others = IdleTime(threading.current_thread()), _started_by_other_tests()
    with subprocess.Popen([sys.executable, "-c", shell if counted else COMPUTES], start_new_session=True) as process:
        try:
            ranks = others if counted else {*others, process.pid}
            idle._processes_moved(ranks)
            until, moved = time.monotonic() + (30.0 if counted else 0.5), False
            while time.monotonic() < until and not moved:
                time.sleep(0.1)
                moved = idle._processes_moved(ranks)
            assert moved == counted
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def test_a_process_that_sleeps_is_no_work():
    idle, others = IdleTime(threading.current_thread()), _started_by_other_tests()
    with subprocess.Popen([sys.executable, "-c", SLEEPS]) as process:
        until, moved = time.monotonic() + 30, True
        while time.monotonic() < until and moved:  # it starts
            idle._processes_moved(others)
            time.sleep(0.5)
            moved = idle._processes_moved(others)
        assert not moved
        process.kill()


@pytest.mark.parametrize("code", [COMPUTES, SLEEPS], ids=["computes", "sleeps"])
def test_another_process_that_computes_is_work_and_one_that_sleeps_is_not(code):
    idle, limit_s = IdleProcess(), 1.0
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        try:
            assert idle.look(process.pid, [], 0.0) == 0.0
            began, longest = time.monotonic(), 0.0
            while time.monotonic() < began + (30.0 if code == SLEEPS else 3.0) and longest < limit_s:
                time.sleep(0.2)
                longest = max(longest, idle.look(process.pid, [], 0.0))
            assert (longest >= limit_s) == (code == SLEEPS)
        finally:
            process.kill()


def seen(rank, state, idle_s=0.0, age_s=1.0, silent_s=0.0):
    report = Report(
        rank=rank, run=1, at="train, step 0", state=state, since_s=20.0, idle_s=idle_s, stack=("a.py:7 in f",)
    )
    return Seen(rank=rank, report=report, age_s=age_s, silent_s=silent_s)


def test_a_run_ends_where_all_that_others_wait_for_do_nothing():
    waits = seen(0, State.WAITS)
    assert idle_ranks([waits, seen(1, State.ELSEWHERE, 15.0)], 15.0) == [1]
    assert not idle_ranks([waits, seen(1, State.ELSEWHERE, 14.9)], 15.0)
    assert not idle_ranks([waits, seen(1, State.ELSEWHERE, 15.0), seen(2, State.ELSEWHERE, 3.0)], 15.0)
    assert not idle_ranks([waits, seen(1, State.WAITS)], 15.0)
    # Behind its run a rank says nothing.
    assert idle_ranks([waits, seen(1, State.ENDED, 15.0, silent_s=60.0)], 15.0) == [1]
    assert not idle_ranks([waits, seen(1, State.ENDED, 14.9, silent_s=60.0)], 15.0)
    # One that says nothing may hold the lock of its Python, and work.
    assert not idle_ranks([waits, seen(1, State.ELSEWHERE, 15.0, silent_s=60.0)], 15.0)
    assert not idle_ranks([waits, Seen(rank=1, report=None, age_s=float("inf"), silent_s=60.0)], 15.0)
    told = told_idle([waits, seen(1, State.ELSEWHERE, 15.0)], 0, 15.0)
    assert "these do not come:\nrank 1 is in no collective, at train, step 0, for 20 s:\n    a.py:7 in f\n" in told
    assert told.endswith("a rank that works has start_timeout_s, one that does nothing timeout_s=15 s: call what waits for others on all "
                         "ranks, or give a larger timeout_s")  # fmt: skip


def test_a_process_that_others_wait_for_has_done_nothing_since_then_until_it_moves():
    idle, other = IdleProcess(), IdleProcess()
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as sleeps:
        time.sleep(1.0)  # it has started
        assert idle.look(sleeps.pid, [], 5.0) == pytest.approx(5.0, abs=0.1)
        time.sleep(0.2)
        assert idle.look(sleeps.pid, [], 9.0) == pytest.approx(5.2, abs=0.2)
        sleeps.kill()
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as spins:
        other.look(spins.pid, [], 5.0)
        time.sleep(0.2)
        assert other.look(spins.pid, [], 9.0) < 1.0
        spins.kill()
