"""What runs on the ranks that one of them is told to end."""

from __future__ import annotations

import os
import signal
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import DataLoader

from lightning_sp import SequenceParallelStrategy
from tests.flows.tiny import Tuned, llama, rows


class Told(pl.Callback):
    """Sends the signal to a rank within a batch, or within a validation."""

    def __init__(self, rank: int, stage: str) -> None:
        self.rank, self.stage = rank, stage

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if self.stage == "train" and trainer.global_step == 1 and trainer.global_rank == self.rank:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_validation_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if self.stage == "validate" and batch_idx == 0 and trainer.global_rank == self.rank:
            os.kill(os.getpid(), signal.SIGTERM)


class Module(Tuned):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.model(**batch).loss)


def samples() -> list[dict[str, Any]]:
    return [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in rows()]


def told(rank: int, stage: str, options: dict[str, int]) -> dict[str, Any]:
    """Fit until a rank is told to end; return after how many steps, and what was raised."""
    trainer = pl.Trainer(
        accelerator="cpu", devices=dist.get_world_size(), max_epochs=2, precision="64-true", logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, num_sanity_val_steps=0,
        callbacks=[Told(rank, stage)],
        strategy=SequenceParallelStrategy(preflight=False, **options),
    )  # fmt: skip
    raised = ""
    try:
        trainer.fit(Module(llama()), DataLoader(samples(), batch_size=2), DataLoader(samples(), batch_size=2))
    except SIGTERMException as error:
        raised = type(error).__name__
    return {
        "raised": raised,
        "steps": trainer.global_step,
    }
