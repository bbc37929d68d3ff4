"""A trial that fails on one data-parallel group's shards is told by every rank, also where torchrun ends all with the first one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
WHY = r"preflight: training_step runs on a crop of 4 x 32 tokens whole, and fails on shards: ValueError: rows of the second group"


def test_a_trial_that_fails_on_one_group_is_told_by_every_rank():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", "--no-python"]
    command += [sys.executable, "-W", "ignore", "-m", "tests.preflight.one_group_run"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    said = ended.stdout + ended.stderr
    assert ended.returncode == 1
    raised = {
        int(rank) for rank in re.findall(rf"\[rank(\d)\]: lightning_sp\.errors\.SequenceParallelError: {WHY}", said)
    }
    waited = {
        int(rank)
        for rank in re.findall(rf"rank (\d) waits for ranks that have ended: rank [23] has raised .*{WHY}", said)
    }
    assert raised >= {2} or raised >= {3}, said[-3000:]
    assert raised | waited == {0, 1, 2, 3}, said[-3000:]
