"""Metrics that keep lists of what steps have given them, of a validation in which a group has fewer batches than another, or none."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import CatMetric, Metric
from torchmetrics.classification import BinaryAUROC, MulticlassAveragePrecision
from torchmetrics.retrieval import RetrievalMRR

from tests.trainer.tiny import VOCAB, Plain, TokenDataset, plain_trainer, quiet_trainer, tiny_llama


class Kept(Metric):
    """Keeps each batch's integers by themselves, in rows and columns."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("ids", [], dist_reduce_fx="cat")

    def update(self, ids: Tensor) -> None:
        self.ids.append(ids)

    def compute(self) -> Tensor:
        ids = torch.cat(self.ids) if isinstance(self.ids, list) else self.ids
        return (ids.double() ** 2).sum() + len(ids)


class Lists(Plain):
    """Logs them at the end of a validation."""

    def __init__(self) -> None:
        super().__init__(tiny_llama)
        self.area, self.precision = BinaryAUROC(), MulticlassAveragePrecision(VOCAB)
        self.firsts, self.ids, self.found = CatMetric(), Kept(), RetrievalMRR()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        logits = self.logits(batch)
        targets = batch["input_ids"]
        self.area.update(logits[..., 0].sigmoid().flatten(), targets.flatten() % 2)
        self.precision.update(logits.flatten(0, 1).softmax(-1), targets.flatten())
        self.firsts.update(logits[0, :, 0].abs().max())
        self.ids.update(targets)
        self.found.update(logits[..., 0].flatten(), targets.flatten() % 2, targets[:, :1].expand_as(targets).flatten())

    def on_validation_epoch_end(self) -> None:
        self.log("area", self.area.compute())
        self.log("precision", self.precision.compute())
        self.log("first", self.firsts.compute().reshape(-1).max())
        self.log("ids", self.ids.compute())
        self.log("found", self.found.compute())
        for metric in (self.area, self.precision, self.firsts, self.ids, self.found):
            metric.reset()


def validate(world: int, strategy: Any, rows: int) -> dict[str, float]:
    """Return what a validation logs."""
    torch.manual_seed(3)
    trainer = plain_trainer() if strategy is None else quiet_trainer(world, strategy=strategy)
    trainer.validate(Lists(), DataLoader(TokenDataset(rows), batch_size=1), verbose=False)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}
