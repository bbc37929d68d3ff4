"""What runs in the ranks: evaluations of batches of other names, before any training step has shown which entries are sequences."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_sp import SequenceParallelStrategy
from lightning_sp.testing import trainer_of_ranks
from tests.trainer.tiny import VOCAB, Plain, _full, tiny_llama


class OwnNames(Plain):
    """Reads tuples (tokens, targets), or nested dicts of them."""

    on_before_optimizer_step = pl.LightningModule.on_before_optimizer_step

    def loss(self, batch: Any) -> Tensor:
        ids, targets = batch if isinstance(batch, (tuple, list)) else (batch["inputs"]["ids"], batch["labels"])
        logits = self.model(ids, torch.arange(ids.shape[1]).expand_as(ids))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(batch[0], torch.arange(batch[0].shape[1]).expand_as(batch[0])).argmax(-1)


class Tagged(OwnNames):
    """Has as many tags of a row as the first batch has tokens."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        states = self.model(batch["words"], torch.arange(batch["words"].shape[1]).expand_as(batch["words"]))
        self.log("val", F.binary_cross_entropy_with_logits(states.mean(1)[:, :16], batch["tags"]), sync_dist=True)


def rows(length: int, *, nested: bool = False) -> list[Any]:
    ids = torch.randint(VOCAB, (4, length + 1), generator=torch.Generator().manual_seed(length))
    if nested:
        return [{"inputs": {"ids": row[:-1]}, "labels": row[1:]} for row in ids]
    return [(row[:-1], row[1:]) for row in ids]


def _trainer(world: int, options: dict[str, Any] | None) -> pl.Trainer:
    return pl.Trainer(
        strategy="auto" if options is None else SequenceParallelStrategy(**options), **trainer_of_ranks(world), logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, max_epochs=1, precision="64-true",
    )  # fmt: skip


def evaluate_then_fit(world: int, options: dict[str, Any] | None, nested: bool) -> dict[str, Any]:
    """Validate and predict, fit, and validate rows of another length. Without options one device."""
    torch.manual_seed(3)
    module, trainer, answer = OwnNames(tiny_llama), _trainer(world, options), {}

    def loader(length: int) -> Any:
        return DataLoader(rows(length, nested=nested), batch_size=2)

    answer["before"] = trainer.validate(module, loader(15), verbose=False)
    if not nested:
        answer["predicted"] = torch.cat(trainer.predict(module, loader(13))).tolist()
    trainer.fit(module, loader(16))
    answer["after"] = trainer.validate(module, loader(10), verbose=False)
    return {**answer, "weights": {name: _full(each.detach()).clone() for name, each in module.named_parameters()}}


def tagged(world: int, options: dict[str, Any] | None) -> Any:
    """Return what rows of 16 tokens and then of 12 are judged by beside 16 tags."""
    torch.manual_seed(3)
    module, trainer = Tagged(tiny_llama), _trainer(world, options)
    made = [
        {"words": row[0], "tags": (torch.arange(16) % 3 == 0).double()} for length in (16, 12) for row in rows(length)
    ]
    return trainer.validate(module, DataLoader(made, batch_size=2), verbose=False)[0]
