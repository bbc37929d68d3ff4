"""Two time limits: that of the start, in which rank 0 may load a large model, and that of steps."""

from __future__ import annotations

import re
import subprocess
import sys
import time

import pytest

from lightning_sp.testing import run_ranks
from tests.trainer.processes import timeout_ranks

LATE = "waited 4 s for rank|has lost another rank"


@pytest.mark.slow
@pytest.mark.parametrize("where", ["configure_model", "setup"])
def test_a_start_may_take_longer_than_a_step(where):
    """Rank 1 waits for rank 0, which loads for 6 s."""
    for error, seconds, limits in run_ranks(
        timeout_ranks.fit_twice, 2, where, 6.0, {"timeout_s": 4.0, "start_timeout_s": 400.0}, True
    ):
        assert error == ""
        assert seconds > 6
        assert limits == [
            ("setup", [400.0]), ("configure_model", [400.0]), ("training_step", [4.0]),
            ("setup", [400.0]), ("configure_model", [400.0]), ("training_step", [4.0]),
        ]  # fmt: skip


@pytest.mark.slow
def test_a_start_in_which_a_rank_does_nothing_ends_by_the_limit_of_a_step():
    # In a process of its own, whose ranks write where it does. It would sleep for two minutes: nothing but its own watch ends it.
    call = 'run_ranks(timeout_ranks.fit_twice, 2, "setup", 120.0, {"timeout_s": 6.0, "start_timeout_s": 400.0}, True, False)'
    lines = f"from lightning_sp.testing import run_ranks; from tests.trainer.processes import timeout_ranks; {call}"
    before = time.monotonic()
    ended = subprocess.run([sys.executable, "-c", lines], check=False, capture_output=True, text=True, timeout=300)
    assert time.monotonic() - before < 100
    assert ended.returncode == 1
    assert "RuntimeError: ranks [0] have ended without an answer, with exit codes [1]" in ended.stderr
    assert "sequence_parallel: rank 0 ends. rank 1 waits in barrier" in ended.stderr
    assert "rank 0 is in no collective, but in tests/trainer/processes/timeout_ranks.py:" in ended.stderr


@pytest.mark.slow
def test_a_step_that_hangs_ends_by_its_own_limit():
    (_, _, first), (error, seconds, _) = run_ranks(
        timeout_ranks.fit_twice, 2, "training_step", 6.0, {"timeout_s": 4.0, "start_timeout_s": 400.0}, True
    )
    assert first[-1][0] == "training_step"
    assert re.search(LATE, error), error
    assert seconds < 100


@pytest.mark.slow
def test_a_start_that_hangs_ends_by_its_own_limit():
    _, (error, _, limits) = run_ranks(
        timeout_ranks.fit_twice, 2, "configure_model", 6.0, {"timeout_s": 400.0, "start_timeout_s": 4.0}, True
    )
    assert re.search(LATE, error), error
    assert [where for where, _ in limits] == ["setup", "configure_model"]


@pytest.mark.slow
def test_the_limit_of_a_world_that_others_made_stays():
    for error, _, limits in run_ranks(
        timeout_ranks.fit_twice, 2, "", 0.0, {"timeout_s": 4.0, "start_timeout_s": 400.0}, False, timeout_s=77.0
    ):
        assert error == ""
        assert {tuple(seconds) for _, seconds in limits} == {(77.0,)}
