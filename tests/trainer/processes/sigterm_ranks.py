"""What runs on the ranks that one of them is told to end."""

from __future__ import annotations

import os
import signal
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import DataLoader

from lightning_sp import SequenceParallelStrategy
from lightning_sp.checkpoint import latest_checkpoint
from lightning_sp.trainer.processes import sigterm
from tests.flows.tiny import Tuned, llama, rows
from tests.instruments.record import Record


class Told(pl.Callback):
    """Sends the signal to a rank within a batch, or within a validation."""

    def __init__(self, rank: int, stage: str, at: int = 1) -> None:
        self.rank, self.stage, self.at = rank, stage, at
        self.sent = False

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        done = trainer.fit_loop.epoch_loop.total_batch_idx
        if self.stage == "train" and done == self.at and trainer.global_rank == self.rank:
            self.send()

    def on_validation_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if self.stage == "validate" and batch_idx == 0 and trainer.global_rank == self.rank:
            self.send()

    def on_train_end(self, trainer: pl.Trainer, module: Any) -> None:
        if self.stage == "behind the last batch" and trainer.global_rank == self.rank:
            self.send()

    def send(self) -> None:
        if not self.sent:
            self.sent = True
            os.kill(os.getpid(), signal.SIGTERM)


class Module(Tuned):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.trained = Record()
        self.validated: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.model(**batch).loss
        self.trained.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.model(**batch).loss)

    def on_validation_epoch_end(self) -> None:
        self.validated.append(float(self.trainer.callback_metrics["val_loss"]))


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
    raised, code = "", None
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            trainer.fit(Module(llama()), DataLoader(samples(), batch_size=2), DataLoader(samples(), batch_size=2))
        except SIGTERMException as error:
            raised, code = type(error).__name__, error.code
    said = [str(each.message) for each in warned if "told to end" in str(each.message)]
    return {"raised": raised, "code": code, "steps": trainer.global_step, "says": said}


def told_behind_the_last_batch(rank: int) -> dict[str, Any]:
    """Fit, of which a rank is told to end in its last hook, then test; return what became of both."""
    options: dict[str, Any] = dict(
        accelerator="cpu", devices=dist.get_world_size(), max_epochs=1, precision="64-true", logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, num_sanity_val_steps=0,
    )  # fmt: skip
    module, loader = Module(llama()), DataLoader(samples(), batch_size=1)
    fitted = pl.Trainer(
        **options,
        callbacks=[Told(rank, "behind the last batch")],
        strategy=SequenceParallelStrategy(preflight=False),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fitted.fit(module, loader)
    found = {"steps": fitted.global_step, "waits": len(sigterm._unheard)}
    try:
        pl.Trainer(**options, strategy=SequenceParallelStrategy(preflight=False)).validate(Module(llama()), loader)
    except SIGTERMException as error:
        found["code"] = error.code
    return {**found, "handler": signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "left": len(sigterm._unheard)}


def preempted(folder: str, stage: str, at: int, accumulate: int, interrupts: bool) -> dict[str, Any]:
    """Fit two epochs, or begin to, and go on from what was saved; return what was trained and validated, and what was left."""
    trained: list[float] = []
    validated: list[float] = []
    found: dict[str, Any] = {}
    for turn in range(1 + interrupts):
        torch.manual_seed(0)
        module = Module(llama())
        told_at = [Told(1, stage, at)] if interrupts and not turn else []
        trainer = pl.Trainer(
            accelerator="cpu", devices=dist.get_world_size(), max_epochs=2, precision="64-true", logger=False, enable_progress_bar=False,
            enable_model_summary=False, num_sanity_val_steps=0, accumulate_grad_batches=accumulate,
            callbacks=[ModelCheckpoint(dirpath=folder, every_n_epochs=2, save_last=True), *told_at],
            strategy=SequenceParallelStrategy(preflight=False, data_parallel_size=1, preemption_exit_code=85),
        )  # fmt: skip
        try:
            trainer.fit(
                module,
                DataLoader(samples(), batch_size=2, shuffle=True),
                DataLoader(samples(), batch_size=2),
                ckpt_path="last" if interrupts else None,
            )
        except SIGTERMException as error:
            found |= {
                "code": error.code,
                "steps": trainer.global_step,
                "latest": Path(str(latest_checkpoint(folder))).name,
            }
        trained += module.trained
        validated += module.validated
    left = sorted(each.name for each in Path(folder).iterdir())
    return {**found, "trained": trained, "validated": validated, "end": trainer.global_step, "left": left}
