"""What each rank runs in test_checkpoint_retention.py."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_sp.callbacks import CheckpointRetention
from tests.checkpoint.background_ranks import fit


def kept(folder: str, later: bool) -> list[str]:
    """Save in each of six steps, all of them to be kept; return what is left."""
    saver = ModelCheckpoint(
        dirpath=folder, filename="{step}", every_n_train_steps=1, save_top_k=-1, save_weights_only=True
    )
    fit(folder, [CheckpointRetention(max_age=timedelta(days=1)), saver], asynchronous_checkpoints=later)
    return sorted(each.name for each in Path(folder).iterdir())
