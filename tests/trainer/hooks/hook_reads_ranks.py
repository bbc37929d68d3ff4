"""What runs in the ranks: a step that leaves its logits in an attribute, and a callback, and hooks that read them."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_sp.testing import trainer_of_ranks
from tests.trainer.tiny import Plain, TokenDataset, quiet_trainer, tiny_llama


class Keeping(Plain):
    def __init__(self, kind: str) -> None:
        super().__init__(tiny_llama)
        self.kind, self.seen = kind, []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.last_logits = self.logits(batch)
        return F.cross_entropy(self.last_logits.flatten(0, 1), batch["shift_labels"].flatten())

    def on_train_batch_end(self, *_: Any) -> None:
        if self.kind == "module":
            self._note()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        pass

    def _note(self) -> None:
        self.seen.append(float(self.last_logits.detach().std()))


class Unread(Keeping):
    on_train_batch_end = pl.LightningModule.on_train_batch_end


class Reader(pl.Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        self.seen.append(float(module.last_logits.detach().std()))


class Uploader(pl.Callback):
    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        _upload(trainer)


class UploadingLogger(DummyLogger):
    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        self.uploaded = checkpoint_callback.last_model_path


def _upload(trainer: Any) -> None:
    trainer.uploaded = trainer.checkpoint_callback.best_model_path


def fit(world: int, kind: str) -> dict[str, Any]:
    """Return the numbers that were made of what the step left, and which view it had; on one device those of plain Lightning."""
    torch.manual_seed(3)
    reader, module = Reader(), Keeping(kind) if kind == "module" else Unread(kind)
    callbacks = [reader] if kind == "callback" else []
    if world == 1:
        trainer = pl.Trainer(
            **trainer_of_ranks(1), logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            max_epochs=1, precision="64-true", callbacks=callbacks,
        )  # fmt: skip
    else:
        strategy = {"ring_size": 2, "global_view": "auto"}
        trainer = quiet_trainer(world, strategy=strategy, callbacks=callbacks)
    trainer.fit(module, DataLoader(TokenDataset(4), batch_size=2))
    whole = world > 1 and trainer.strategy.sees_whole_sequences
    return {"seen": reader.seen if kind == "callback" else module.seen, "whole": whole}
