"""Whether ranks that wait are in a deadlock, and in which words it is told: pure functions of what ranks say."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from lightning_sp.comm.hangs.report import (
    Report,
    Seen,
    State,
    is_deadlock,
    process_here,
    process_state,
    same_waits,
    told_deadlock,
    told_late,
    told_places,
)

WAIT = Report(
    rank=0, run=1, number=7, moves=3, at="train, step 2", state=State.WAITS, since_s=6.0, collective="all_reduce, called in a.py:1 in f",
    line="train.py:5 in main", stack=("train.py:5 in main", "a.py:1 in f"), is_quiet=True,
)  # fmt: skip


def seen(*reports, age_s=0.5, silent_s=0.0):
    return [Seen(rank=rank, report=each, age_s=age_s, silent_s=silent_s) for rank, each in enumerate(reports)]


def other(**changes):
    return replace(WAIT, **{"rank": 1, "collective": "barrier, called in train.py:9 in training_step", **changes})


def test_a_report_makes_a_round_trip():
    assert Report.decode(other().encode()) == other()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"collective": WAIT.collective, "at": "train, step 3"},
        {"state": State.ENDED, "why": "has ended"},
        {"run": 2},
    ],
)
def test_ranks_that_wait_in_different_collectives_or_steps_or_for_one_that_has_ended_are_in_a_deadlock(changes):
    assert is_deadlock(seen(WAIT, other(**changes)), run=1)


@pytest.mark.parametrize(
    "changes",
    [
        {"collective": WAIT.collective},  # one collective: its bytes may be on their way
        {"state": State.ELSEWHERE},  # it may come
        {"since_s": 3.0},
        {"is_quiet": False},  # a transfer
    ],
)
def test_a_rank_that_may_go_on_is_no_deadlock(changes):
    assert not is_deadlock(seen(WAIT, other(**changes)), run=1)


def test_old_reports_say_nothing():
    assert not is_deadlock(seen(WAIT, other(), age_s=5.0), run=1)
    assert not is_deadlock(seen(WAIT, other(), age_s=float("inf")), run=1)
    assert not is_deadlock(seen(WAIT, None), run=1)


def test_a_rank_whose_last_run_has_ended_may_begin_the_next_one():
    ended, waits = other(state=State.ENDED, run=1), replace(WAIT, run=2)
    assert not is_deadlock(seen(waits, ended), run=2)


def test_all_that_have_left_wait_for_nothing():
    ended = other(state=State.ENDED)
    assert not is_deadlock(seen(replace(ended, rank=0), ended), run=1)


def test_the_same_waits_have_the_same_mark():
    assert same_waits(seen(WAIT, other())) == same_waits(seen(replace(WAIT, number=9), other()))
    assert same_waits(seen(WAIT, other())) != same_waits(seen(WAIT, other(moves=4)))


def test_a_deadlock_is_told_with_each_collective_its_step_and_line():
    said = told_deadlock(seen(WAIT, other(), replace(WAIT, rank=2)))
    assert said.startswith(
        "ranks wait in different collectives, and none of them can end: ranks 0, 2 waits in all_reduce, called in a.py:1 in f, from "
        "train.py:5 in main, at train, step 2; rank 1 waits in barrier, called in train.py:9 in training_step, from"
    )
    assert "so the model in a hook, and what reads its weights (parameter.norm())" in said
    assert said.endswith("and give all ranks equally many batches")


def test_a_run_that_one_rank_has_ended_is_told_so():
    said = told_deadlock(seen(WAIT, other(state=State.ENDED, why="has ended its run, without an error")))
    assert said.startswith("some ranks have ended the run, and the others wait for them: rank 0 waits in all_reduce")
    assert "rank 1 has ended its run, without an error, at train, step 2" in said


def test_a_rank_that_does_not_come_is_told_with_its_stack():
    late = other(state=State.ELSEWHERE, collective="", since_s=61.0)
    assert told_late(seen(WAIT, late), 0) == (
        "rank 0 waits in all_reduce, called in a.py:1 in f, from train.py:5 in main, at train, step 2, for 6 s, and these do not come:\n"
        "rank 1 is in no collective, but in train.py:5 in main, at train, step 2, for 61 s:\n    train.py:5 in main\n    a.py:1 in f"
    )


def test_ranks_that_all_wait_in_one_collective_have_a_slow_network():
    said = told_late(seen(WAIT, replace(WAIT, rank=1)), 0)
    assert "and so do all: ranks 0-1 waits in all_reduce" in said
    assert said.endswith("If it is one collective, the network is down, or very slow")


def test_a_rank_that_does_not_answer_is_told_with_its_process():
    own = Seen(rank=0, report=WAIT, age_s=0.5, silent_s=0.0)
    far = Seen(rank=1, report=replace(WAIT, process=(77, "node1", "pid:[1]")), age_s=9.0, silent_s=9.0)
    assert "rank 1 does not answer (process 77 on node1): it is stopped or gone" in told_late([own, far], 0)
    assert "py-spy dump --native --pid 77" in told_late([own, far], 0)


def test_many_different_ranks_are_told_in_part():
    said = told_places(seen(*(replace(WAIT, rank=rank, line=f"train.py:{rank} in f") for rank in range(20))))
    assert "rank 7 " in said
    assert "rank 8 " not in said
    assert said.endswith("; 12 more")


def test_a_process_of_this_host_is_known_by_the_kernel():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        here = (process.pid, *process_here()[1:])
        os.kill(process.pid, 19)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        assert process_state(here) == "T"
        assert told_places(seen(replace(WAIT, process=here))) == (
            f"rank 0 is stopped (process {process.pid} on {here[1]}: SIGSTOP, Ctrl-Z or a debugger)"
        )
        process.kill()
        process.wait()
        assert process_state(here) == "X"
        assert f"rank 0 has ended without a word (process {process.pid}" in told_places(
            seen(replace(WAIT, process=here))
        )
    assert process_state((1, "another host", "")) == ""
