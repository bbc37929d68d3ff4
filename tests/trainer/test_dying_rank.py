"""A rank that dies ends the others, and its own traceback is shown."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("how", "words"), [("exit", "RuntimeError"), ("raise", "ValueError: boom on rank 1")])
def test_a_rank_that_dies_ends_the_others(how, words):
    # Far below the strategy's timeout of 300 s: the peers notice the closed connection, not the timeout.
    command = [sys.executable, "-W", "ignore", "-m", "tests.trainer.dying_rank", how]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150, check=False)
    assert ended.returncode != 0
    assert words in ended.stderr, ended.stderr[-3000:]
