"""Checkpoints are kept by age beside ModelCheckpoint's number."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_sp import SequenceParallelError, SequenceParallelStrategy
from lightning_sp.callbacks import CheckpointRetention
from tests.callbacks import retention_ranks as ranks
from tests.checkpoint.test_expired import saved
from tests.trainer.tiny import Plain, tiny_llama


@pytest.mark.parametrize("later", [True, False])
def test_old_ones_go_when_a_newer_one_is_complete(pools: Any, tmp_path: Path, later: bool):
    saved(tmp_path, old=1, older=2)
    (tmp_path / "notes.txt").write_text("kept")
    own = [f"step={step}.ckpt" for step in range(1, 7)]
    for found in pools(2).run(ranks.kept, str(tmp_path), later):
        assert found == ["notes.txt", *own]


def test_an_age_is_a_time_above_0():
    assert CheckpointRetention({"hours": 36}).max_age == timedelta(days=1, hours=12)
    with pytest.raises(
        SequenceParallelError, match=re.escape("max_age={'fortnights': 1}): a timedelta, or its keywords")
    ):
        CheckpointRetention({"fortnights": 1})
    with pytest.raises(SequenceParallelError, match=r"max_age=3\): a timedelta"):
        CheckpointRetention(3)  # type: ignore[arg-type]
    with pytest.raises(SequenceParallelError, match=r"max_age=0:00:00\) would keep the newest checkpoint alone"):
        CheckpointRetention(timedelta(0))


def test_it_needs_folders_and_a_strategy_that_says_when_a_checkpoint_is_complete():
    options: Any = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "max_epochs": 1,
        "callbacks": [CheckpointRetention({"days": 2})],
    }
    without = pl.Trainer(strategy=SequenceParallelStrategy(), enable_checkpointing=False, **options)
    with pytest.raises(
        SequenceParallelError, match=r"max_age=2 days, 0:00:00\) deletes in .* this Trainer has 0 ModelCheckpoint"
    ):
        without.fit(Plain(tiny_llama), [])
    other = pl.Trainer(strategy="auto", **options)
    with pytest.raises(SequenceParallelError, match="which SingleDeviceStrategy with TorchCheckpointIO does not say"):
        other.fit(Plain(tiny_llama), [])
