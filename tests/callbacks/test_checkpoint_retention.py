"""Checkpoints are kept by age beside ModelCheckpoint's number."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_sp import SequenceParallelError, SequenceParallelStrategy
from lightning_sp.callbacks import CheckpointRetention
from lightning_sp.callbacks.checkpoint_retention import is_of
from tests.callbacks import retention_ranks as ranks
from tests.checkpoint.folders.test_expired import saved
from tests.trainer.tiny import Plain, tiny_llama


@pytest.mark.parametrize("later", [pytest.param(True, marks=pytest.mark.slow), False])
def test_old_ones_go_when_a_newer_one_is_complete(pools: Any, tmp_path: Path, later: bool):
    # Two of an earlier run, and two with names that no ModelCheckpoint gives.
    saved(tmp_path, **{"step=300": 1, "step=301-v1": 2, "pretrained": 1, "step=300-edited": 2})
    (tmp_path / "notes.txt").write_text("kept")
    own = [f"step={step}.ckpt" for step in range(1, 7)]
    for found in pools(2).run(ranks.kept, str(tmp_path), later):
        assert found == sorted(["notes.txt", "pretrained.ckpt", "step=300-edited.ckpt", *own])


@pytest.mark.parametrize(
    ("template", "own", "others"),
    [
        (None, ["epoch=3-step=40.ckpt", "epoch=3-step=40-v2.ckpt", "last.ckpt"], ["epoch=3.ckpt", "my-model.ckpt"]),
        ("best/{epoch:02d}-{val_loss:.2f}", ["epoch=07-val_loss=-0.31.ckpt"], ["val_loss=0.3.ckpt", "epoch=a-val_loss=b.ckpt"]),
        ("{acc}", ["acc=nan.ckpt"], ["acc=.ckpt"]),
        ("final", ["final.ckpt", "final-v1.ckpt"], ["final2.ckpt", "semifinal.ckpt"]),
    ],
)  # fmt: skip
def test_the_names_that_a_callback_gives(template, own, others):
    saver = ModelCheckpoint(filename=template)
    assert [is_of([saver], name) for name in own] == [True] * len(own)
    assert not any(is_of([saver], name) for name in others)


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
    }
    # Not by a fit, which would leave this process in a world of its own.
    retention, module = CheckpointRetention({"days": 2}), Plain(tiny_llama)
    without = pl.Trainer(strategy=SequenceParallelStrategy(), enable_checkpointing=False, **options)
    with pytest.raises(
        SequenceParallelError, match=r"max_age=2 days, 0:00:00\) deletes in .* this Trainer has 0 ModelCheckpoint"
    ):
        retention.setup(without, module, "fit")
    other = pl.Trainer(strategy="auto", **options)
    with pytest.raises(SequenceParallelError, match="which SingleDeviceStrategy with TorchCheckpointIO does not say"):
        retention.setup(other, module, "fit")
