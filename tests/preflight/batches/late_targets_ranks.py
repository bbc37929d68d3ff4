"""What runs in the ranks: a first batch of which every target is ignored, in a step that divides by hand."""

from __future__ import annotations

import warnings
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_sp import SequenceParallelStrategy
from lightning_sp.testing import trainer_of_ranks
from tests.trainer.tiny import Plain, TokenDataset, _full, tiny_llama


class ByHand(Plain):
    """Divides a sum by the targets of the batch: wrong on parts, exact in the global view."""

    on_before_optimizer_step = pl.LightningModule.on_before_optimizer_step

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if "shift_labels" not in batch:
            loss = self.logits(batch).softmax(-1).square().sum(-1).mean()
            self.losses.append(float(loss.detach()))
            return loss
        targets = batch["shift_labels"]
        if "weight" in batch:  # exact on parts
            loss = F.cross_entropy(self.logits(batch).flatten(0, 1), targets.flatten())
            self.losses.append(float(loss.detach()))
            return loss
        total = F.cross_entropy(self.logits(batch).flatten(0, 1), targets.flatten(), reduction="sum")
        loss = total / targets.ne(-100).sum().clamp(min=1)
        self.losses.append(float(loss.detach()))
        return loss


def fit(world: int, options: dict[str, Any] | None, accumulation: int = 1, late: bool = False) -> dict[str, Any]:
    """Train three optimizer steps whose first micro-batch has no targets; return losses, weights and warnings. Without options one device.

    With `late` the last of eight steps have no entry of targets.
    """
    torch.manual_seed(3)
    rows = list(TokenDataset(16 if late else 6 * accumulation, 16))
    for row in rows[:0] if late else rows[:2]:
        row["shift_labels"] = torch.full_like(row["shift_labels"], -100)
    for row in rows if late else []:
        row["weight"] = torch.ones(())
    for row in rows[10:] if late else []:
        del row["shift_labels"]
    module = ByHand(tiny_llama)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = pl.Trainer(
            strategy="auto" if options is None else SequenceParallelStrategy(**options), **trainer_of_ranks(world), logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, max_epochs=1, precision="64-true",
            accumulate_grad_batches=accumulation,
        )  # fmt: skip
        trainer.fit(module, DataLoader(rows, batch_size=2))
    weights = {name: _full(each.detach()).clone() for name, each in module.named_parameters()}
    whole = options is not None and trainer.strategy.sees_whole_sequences
    return {"losses": module.losses, "weights": weights, "said": [str(each.message) for each in caught], "whole": whole}
