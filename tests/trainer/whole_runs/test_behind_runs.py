"""What a script reads of its trained model behind the fit is the whole's, and what it writes there stays, as on one device."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.trainer.whole_runs import behind_runs_ranks as ranks

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def found(pools):
    return pools(2).run(ranks.read_behind_a_fit)


def test_numbers_of_weights_are_the_wholes(found):
    for rank in found:
        for name, (number, whole) in rank["numbers"].items():
            assert number == pytest.approx(whole, rel=1e-12), name


def test_a_write_to_a_part_of_a_weight_stays(found):
    assert [rank["written"] for rank in found] == [[0.0, 2.0]] * 2


def test_a_method_of_the_users_own_gives_what_the_call_gives(found):
    """Its last layer is the LightningModule's own: no unit's forward gathers it."""
    for rank in found:
        assert rank["same logits"]
        assert rank["refused with gradients"].startswith(
            "linear of a weight of shape (61, 32), which is sharded outside of a step"
        )


@pytest.mark.slow
@pytest.mark.parametrize("reads", ["number", "call", "trainer"])
def test_what_one_rank_reads_alone_ends_with_the_reason(reads):
    command = [sys.executable, "-W", "ignore", "-m", "tests.trainer.whole_runs.behind_runs_ranks", reads]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode != 0
    assert "has lost another rank: " in ended.stderr
    assert "rank 1 has come to the end of its script" in ended.stderr
    waits = "sequence_parallel: rank 0 waits in wait, called in lightning_sp/parallelize/fsdp/gloo_collectives.py"
    assert reads != "trainer" or waits in ended.stderr
