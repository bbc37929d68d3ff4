"""Runs whose validation counts with torchmetrics, held in each way that users hold them; names are inferred from tuples."""

from __future__ import annotations

import pickle
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import CatMetric, MetricCollection, MetricTracker, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

from lightning_sp import SequenceParallelStrategy

V, LENGTH = 23, 18


class Counting(pl.LightningModule):
    """Positions are counted in its forward, so that a rank's part is refused.

    Args:
        shifts: whether the validation shifts its targets itself.
        counts: its metrics: "matrix" is read by hand alone, "accuracy" logged alone, "all" are both, and more.
    """

    def __init__(self, counts: str, shifts: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.counts, self.shifts = counts, shifts
        self.embed, self.places, self.qkv, self.head = (
            nn.Embedding(V, 16),
            nn.Embedding(64, 16),
            nn.Linear(16, 48),
            nn.Linear(16, V),
        )
        self.matrix = MulticlassConfusionMatrix(V)
        self.accuracy = MulticlassAccuracy(V, average="micro")
        self.trained = SumMetric()
        self.in_a_list, self.in_a_dict = [SumMetric(), CatMetric()], {"best": SumMetric()}
        self.both = MetricCollection({"first": SumMetric(), "second": SumMetric()})
        self.within = CatMetric()
        self.tracker = MetricTracker(SumMetric(), maximize=True)  # copies its metric in each epoch
        self.numbers: list[float] = []

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        return self.head(x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids, targets = batch
        self.trained.update(targets.numel())
        self.log("trained", self.trained, on_step=False, on_epoch=True)
        return F.cross_entropy(self(ids).flatten(0, 1), targets.flatten())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        ids, targets = batch
        logits = self(ids)
        if self.shifts:
            logits, targets = logits[:, :-1], ids[:, 1:]
        if self.counts in ("matrix", "all"):
            self.matrix.update(logits.argmax(-1), targets)
        if self.counts in ("accuracy", "all"):
            self.accuracy(logits.argmax(-1), targets)
            self.log("accuracy", self.accuracy)
        if self.counts == "all":
            counted = targets > 3
            self.in_a_list[0].update(counted.sum())
            self.in_a_list[1].update(logits.amax(-1)[counted])
            self.within.update(logits.amax(-1))
            self.numbers.append(float(self.within.compute().double().sum()))  # within an epoch
            self.in_a_dict["best"].update(logits.amax(-1).sum())
            self.both.update(logits.amax(-1).sum())
            self.tracker.update(logits.amax(-1).sum())
            self.log("collected", self.both["first"])

    def on_validation_epoch_start(self) -> None:
        self.tracker.increment()

    def on_validation_epoch_end(self) -> None:
        if self.counts in ("matrix", "all"):
            found = self.matrix.compute()
            self.numbers += [float(found.sum()), float(found.diagonal().sum()), float((found * torch.arange(V)).sum())]
            self.matrix.reset()
        if self.counts == "all":
            of_tokens = self.in_a_list[1].compute()
            self.numbers += [float(self.in_a_list[0].compute()), float(of_tokens.numel()), float(of_tokens.median())]
            self.numbers += [float(self.in_a_dict["best"].compute()), float(self.tracker.compute())]
            self.numbers += [float(self.both["second"].clone().compute()), len(pickle.dumps(self.both["first"])) > 0]
            for each in (*self.in_a_list, *self.in_a_dict.values()):
                each.reset()

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0]).argmax(-1)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def rows(number: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    ids = torch.randint(V, (number, LENGTH), generator=torch.Generator().manual_seed(seed))
    return [(row, (row * 3 + torch.arange(LENGTH)) % 7) for row in ids]


class OnParts(Counting):
    """Trains with positions of the batch, and validates with its own."""

    def __init__(self) -> None:
        super().__init__("accuracy", False)
        self.seen_whole: list[bool] = []
        self.kept: list[Tensor] = []

    def on_train_epoch_end(self) -> None:
        kept = torch.cat(self.kept)
        self.numbers += [float(kept.numel()), float((kept * torch.arange(LENGTH)).sum())]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.embed(batch["input_ids"]) + self.places(batch["position_ids"])
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        self.trained.update((batch["shift_labels"] >= 0).sum())
        self.log("trained", self.trained, on_step=False, on_epoch=True)
        self.seen_whole.append(getattr(self.trainer.strategy, "sees_whole_sequences", False))
        logits = self.head(x)
        self.kept.append(logits.argmax(-1))
        return F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", F.cross_entropy(self(batch["input_ids"]).flatten(0, 1), batch["shift_labels"].flatten()))


def trained_on_parts(world: int, options: dict[str, Any]) -> dict[str, Any]:
    """Fit an epoch; return what its metric and its list of training say, and whether a step of training saw whole sequences."""
    module = OnParts()
    made = [{"input_ids": a, "shift_labels": b, "position_ids": torch.arange(LENGTH)} for a, b in rows(12, 0)]
    strategy: Any = SequenceParallelStrategy(**options) if options else "auto"
    trainer = pl.Trainer(
        accelerator="cpu", devices=world, strategy=strategy, max_epochs=1, precision="64-true", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(module, DataLoader(made, 4), DataLoader(made[:4], 4))
    trained = float(trainer.callback_metrics["trained"])
    return {"trained": trained, "whole": any(module.seen_whole), "numbers": module.numbers}


def run(counts: str, shifts: bool, world: int, rows_of_a_batch: int, options: dict[str, Any]) -> dict[str, Any]:
    """Fit two epochs and predict; return all numbers, by one device without options of a strategy."""
    module = Counting(counts, shifts)
    strategy: Any = SequenceParallelStrategy(**options) if options else "auto"
    trainer = pl.Trainer(
        accelerator="cpu", devices=world, strategy=strategy, max_epochs=2, precision="64-true", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(module, DataLoader(rows(12, 0), rows_of_a_batch), DataLoader(rows(8, 1), rows_of_a_batch))
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    predicted = torch.cat(trainer.predict(module, DataLoader(rows(8, 2), rows_of_a_batch)))
    return {"logged": logged, "numbers": module.numbers, "predicted": predicted.tolist()}
