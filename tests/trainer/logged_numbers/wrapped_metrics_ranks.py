"""Metrics of other metrics, of a fit whose last step and whose validation leave a data-parallel group without samples."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import MaxMetric, MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassPrecision, MulticlassRecall
from torchmetrics.wrappers import MetricTracker, Running

from tests.trainer.tiny import VOCAB, Plain, TokenDataset, plain_trainer, quiet_trainer, tiny_llama


def _collection() -> MetricCollection:
    """Return metrics of which one counts for all: they share a group of states."""
    return MetricCollection(
        {"p": MulticlassPrecision(VOCAB, ignore_index=-100), "r": MulticlassRecall(VOCAB, ignore_index=-100)}
    )


class Wrapped(Plain):
    """Counts in training and in validation."""

    def __init__(self) -> None:
        super().__init__(tiny_llama)
        self.together, self.most, self.last = _collection(), MaxMetric(), Running(SumMetric(), window=2)
        accuracy = MulticlassAccuracy(VOCAB, average="micro", ignore_index=-100)
        self.tracker = MetricTracker(MetricCollection({"a": accuracy, **_collection()}))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        pass

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits, targets = self.logits(batch).flatten(0, 1), batch["shift_labels"].flatten()
        self.together.update(logits.detach(), targets)
        self.log_dict(self.together, on_step=False, on_epoch=True)
        self.most.update(logits.detach().abs().max())
        self.log("most", self.most, on_step=False, on_epoch=True)
        self.last.update(logits.detach().sum())
        return F.cross_entropy(logits, targets)

    def on_train_epoch_end(self) -> None:
        self.log("last", self.last.compute().double())

    def on_validation_epoch_start(self) -> None:
        self.tracker.increment()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.tracker.update(self.logits(batch).flatten(0, 1), batch["shift_labels"].flatten())

    def on_validation_epoch_end(self) -> None:
        self.log_dict({name: value.double() for name, value in self.tracker.compute().items()})


def fit(world: int, strategy: dict[str, Any] | None) -> tuple[dict[str, float], Any]:
    """Return what two epochs of nine samples log, with a validation of two, and the best of it, read behind the fit."""
    torch.manual_seed(3)
    module, options = Wrapped(), {"max_epochs": 2, "num_sanity_val_steps": 0}
    trainer = plain_trainer(**options) if strategy is None else quiet_trainer(world, strategy=strategy, **options)
    size = 4 if strategy is None else 2
    trainer.fit(module, DataLoader(TokenDataset(9), batch_size=size), DataLoader(TokenDataset(2), batch_size=size))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}, module.tracker.best_metric()
