"""What runs in the ranks: steps and hooks that share what they keep, on a batch that is a filler of one group."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import MaxMetric, MeanMetric, MetricCollection, SumMetric

from tests.trainer.tiny import Plain, TokenDataset, _full, plain_trainer, quiet_trainer, tiny_llama


class Counting(Plain):
    """Counts its rows in a metric, which its hooks read."""

    def __init__(self) -> None:
        super().__init__(tiny_llama)
        self.rows = SumMetric()
        self.both = MetricCollection([MeanMetric(), MaxMetric()])
        self.found: list[float] = []

    def loss_of(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.logits(batch).flatten(0, 1), batch["shift_labels"].flatten())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        pass

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss_of(batch)
        self.rows.update(len(batch["input_ids"]))
        self.both.update(loss.detach())
        self.log_dict(self.both, on_step=False, on_epoch=True)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.found.append(float(self.rows.compute()))

    def on_train_epoch_end(self) -> None:
        self.log("rows", float(self.rows.compute()))

    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.first = float(batch["input_ids"][0, 0])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.rows.update(len(batch["input_ids"]))
        self.log("first", self.first, on_step=True, on_epoch=True, sync_dist=True)
        self.last = self.first

    def on_validation_batch_end(self, *_: Any) -> None:
        self.found += [self.last, float(self.rows.compute())]

    def on_validation_epoch_end(self) -> None:
        self.log("rows", float(self.rows.compute()))


class Resets(Counting):
    """Begins anew with the last batch of an epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.trainer.is_last_batch:
            self.rows.compute()
            self.rows.reset()
        return loss


class OwnTargets(Counting):
    """Makes its targets in the step."""

    def loss_of(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.logits(batch).flatten(0, 1), batch["input_ids"].roll(-1, 1).flatten())


class OwnTuple(Counting):
    """Makes tuples of its batches, which carry no mark."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch["input_ids"], batch["position_ids"], batch["shift_labels"]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids, positions, targets = batch
        return super().training_step({"input_ids": ids, "position_ids": positions, "shift_labels": targets}, batch_idx)


KINDS = {"counting": Counting, "resets": Resets, "own targets": OwnTargets, "own tuple": OwnTuple}


def fit(
    kind: str, world: int, strategy: dict[str, Any] | None
) -> tuple[dict[str, float], list[float], dict[str, Tensor]]:
    """Return what a fit of three samples, two in a step, logs, what its hooks have found, and its weights."""
    torch.manual_seed(3)
    module, options = KINDS[kind](), {"max_epochs": 2, "num_sanity_val_steps": 0}
    trainer = plain_trainer(**options) if strategy is None else quiet_trainer(world, strategy=strategy, **options)
    trainer.fit(module, DataLoader(TokenDataset(3), batch_size=2 if strategy is None else 1))
    weights = {name: _full(each.detach()).clone() for name, each in module.named_parameters()}
    return {name: float(value) for name, value in trainer.callback_metrics.items()}, module.found, weights


def validate(world: int, strategy: dict[str, Any] | None, rows: int) -> tuple[dict[str, float], list[float]]:
    """Return what a validation logs, and what its hooks have found."""
    torch.manual_seed(3)
    module = Counting()
    trainer = plain_trainer() if strategy is None else quiet_trainer(world, strategy=strategy)
    [logged] = trainer.validate(module, DataLoader(TokenDataset(rows), batch_size=1), verbose=False)
    return dict(logged), module.found
