"""What the ranks of test_signatures run: steps that take their arguments in the ways that Lightning allows."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import lightning.pytorch as pl
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tests.trainer.tiny import TokenDataset, quiet_trainer
from tests.trainer.whole_runs.behind_runs_ranks import User


def counted(step: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator of the user's."""

    @wraps(step)
    def call(*args: Any, **kwargs: Any) -> Any:
        return step(*args, **kwargs)

    return call


class OfBatch(User):
    """Steps that take their batch alone."""

    def loss(self, batch: Any) -> Any:
        return F.cross_entropy(self(batch["input_ids"]).flatten(0, 1), batch["shift_labels"].flatten())

    def training_step(self, batch: Any) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any) -> None:
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch: Any) -> None:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: Any) -> Any:
        return self(batch["input_ids"])


class Decorated(OfBatch):
    training_step = counted(OfBatch.training_step)
    validation_step = counted(OfBatch.validation_step)
    test_step = counted(OfBatch.test_step)
    predict_step = counted(OfBatch.predict_step)


class Indexed(OfBatch):
    def training_step(self, batch: Any, number: int) -> Any:
        return super().training_step(batch)

    def validation_step(self, batch: Any, number: int, loader: int = 0) -> None:
        super().validation_step(batch)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return super().predict_step(batch)


class Open(OfBatch):
    def training_step(self, *args: Any) -> Any:
        return super().training_step(args[0])

    def validation_step(self, *args: Any, **kwargs: Any) -> None:
        super().validation_step(args[0])


FORMS = (OfBatch, Decorated, Indexed, Open)


def run(strategy: dict[str, Any] | None) -> list[tuple[dict[str, float], list[float]]]:
    """Fit, validate, test and predict with each form; return what was logged, and a sum of each batch's predictions.

    Args:
        strategy: options on two ranks; None: plain Lightning on one process.
    """
    found = []
    for form in FORMS:
        torch.manual_seed(0)
        module, loader = form().double(), DataLoader(TokenDataset(4), batch_size=2)
        trainer = _plain() if strategy is None else quiet_trainer(2, strategy=strategy, max_steps=2, max_epochs=1)
        trainer.fit(module, loader, loader)
        logged = dict(trainer.callback_metrics)
        logged |= trainer.test(module, loader, verbose=False)[0]
        predicted = trainer.predict(module, loader)
        found.append(
            ({name: float(value) for name, value in logged.items()}, [each.sum().item() for each in predicted])
        )
    return found


def _plain() -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu", devices=1, max_steps=2, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, precision="64-true",
    )  # fmt: skip
