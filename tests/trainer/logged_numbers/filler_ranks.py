"""Numbers that steps log where the samples do not divide over the data-parallel groups: run on ranks, and in plain Lightning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, SumMetric

from tests.trainer.tiny import Plain, TokenDataset, plain_trainer, quiet_trainer, tiny_llama

NAMES = ("mean", "max", "min")


class Logs(Plain):
    """Logs a loss and its rows by each way to reduce them, in steps, in hooks, and by metrics."""

    def __init__(self) -> None:
        super().__init__(tiny_llama)
        self.kept = torch.nn.ModuleDict(
            {"of losses": MeanMetric(), "of rows": SumMetric(), "weighted": MeanMetric(), "each row": MeanMetric()}
        )
        self.shown: list[dict[str, float]] = []
        self.ended: list[int] = []

    def on_before_batch_transfer(self, batch: dict[str, Tensor], dataloader_idx: int) -> dict[str, Tensor]:
        """Make another dict, and its targets."""
        return {**batch, "shift_labels": batch["input_ids"].roll(-1, 1)}

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss, rows = super().training_step(batch, batch_idx), len(batch["input_ids"])
        for name in NAMES:
            self.log(f"loss {name}", loss.detach(), reduce_fx=name, sync_dist=True, on_step=True, on_epoch=True)
        self.log("rows", float(rows), reduce_fx="sum", sync_dist=True, on_step=True, on_epoch=True)
        self.log("by size", loss.detach(), batch_size=rows, on_epoch=True, sync_dist=True)
        self.log("only of steps", loss.detach(), sync_dist=True)
        self.kept["of losses"](loss.detach())
        self.kept["of rows"].update(rows)
        self.kept["weighted"].update(loss.detach(), rows)
        self.kept["each row"].update(batch["input_ids"][:, 0].double())
        for name, metric in self.kept.items():
            self.log(name, metric, on_step=False, on_epoch=True)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        super().on_before_optimizer_step(optimizer)
        self.log("optimizer steps", 1.0, sync_dist=True, on_epoch=True)

    def on_train_batch_end(self, *_: Any) -> None:
        self.log("behind", float(self.losses[-1]), on_step=True, on_epoch=True, sync_dist=True)
        self.shown.append(
            {name: float(value) for name, value in self.trainer.callback_metrics.items() if "step" in name}
        )

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        loss = F.cross_entropy(self.logits(batch).flatten(0, 1), batch["shift_labels"].flatten())
        self.log("val loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("val rows", float(len(batch["input_ids"])), reduce_fx="sum", on_step=True, sync_dist=True)

    def on_validation_batch_end(self, outputs: Any, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.ended.append(len(batch["input_ids"]))
        self.log("val ended", 0.5, reduce_fx="sum", sync_dist=True)


def fit(world: int, strategy: dict[str, Any] | None, rows: int, batch: int) -> tuple[dict[str, float], list[Any], int]:
    """Return what a fit has logged at its end, what at the end of each batch, and how many validation batches a hook has seen."""
    torch.manual_seed(3)
    module = Logs()
    options: dict[str, Any] = {"max_epochs": 1, "num_sanity_val_steps": 0}
    trainer = plain_trainer(**options) if strategy is None else quiet_trainer(world, strategy=strategy, **options)
    data = TokenDataset(rows)
    trainer.fit(module, DataLoader(data, batch_size=batch), DataLoader(data, batch_size=1))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}, module.shown, sum(module.ended)


@dataclass
class Rows:
    """A batch of a user's own class."""

    input_ids: Tensor
    position_ids: Tensor


class Unlabeled(TokenDataset):
    """Has nothing to train on."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = super().__getitem__(index)
        del sample["shift_labels"]
        return sample


class OwnClass(Plain):
    """Makes batches of its own class, which carry no mark."""

    def on_before_batch_transfer(self, batch: dict[str, Tensor], dataloader_idx: int) -> Rows:
        return Rows(**batch)

    def predict_step(self, batch: Rows, batch_idx: int) -> Tensor:
        return self.model(batch.input_ids, batch.position_ids).flatten(1).amax(1)

    def validation_step(self, batch: Rows, batch_idx: int) -> None:
        self.log("rows", float(len(batch.input_ids)), reduce_fx="sum", sync_dist=True)
        self.log("first", self.model(batch.input_ids, batch.position_ids).flatten(1).amax(1).mean(), sync_dist=True)


def evaluate(world: int, strategy: dict[str, Any] | None, rows: int) -> tuple[dict[str, float], list[float]]:
    """Return what a validation of batches of a user's own class logs, and predictions, without targets."""
    torch.manual_seed(3)
    trainer = plain_trainer() if strategy is None else quiet_trainer(world, strategy=strategy)
    module, data = OwnClass(tiny_llama), DataLoader(Unlabeled(rows), batch_size=1)
    [found] = trainer.validate(module, data, verbose=False)
    return dict(found), torch.cat(trainer.predict(module, data)).tolist()
