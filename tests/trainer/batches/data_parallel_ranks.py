"""What each rank runs in test_data_parallel.py; returns plain values."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from lightning_sp import SequenceParallelStrategy
from lightning_sp.testing import trainer_of_ranks
from tests.trainer.tiny import VOCAB, Plain, _full, tiny_llama

LENGTH = 14


class OwnNames(Plain):
    """Shifts its labels by hand, and weighs tokens by an entry of its own name and one that is sparse."""

    on_before_optimizer_step = pl.LightningModule.on_before_optimizer_step

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        ids = batch["input_ids"]
        logits = self.model(ids, torch.arange(ids.shape[1]).expand_as(ids))[:, :-1]
        each = F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="none")
        weights = batch["importance"][:, 1:] * batch["classes"].to_dense().sum(1, keepdim=True)
        return (each * weights.flatten()).mean()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)


def collated(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    batch: dict[str, Tensor] = default_collate(samples)
    return {**batch, "classes": batch["classes"].to_sparse()}


def fit(world: int, options: dict[str, Any] | None, rows_of_a_batch: int) -> dict[str, Any]:
    """Fit and validate; return weights and what was logged. Without options one device."""
    torch.manual_seed(3)
    module, g = OwnNames(tiny_llama), torch.Generator().manual_seed(2)
    ids = torch.randint(VOCAB, (8, LENGTH), generator=g)
    rows = [
        {
            "input_ids": row,
            "labels": row,
            "importance": torch.rand(LENGTH, generator=g),
            "classes": torch.eye(4)[i % 4] * (i + 1),
        }
        for i, row in enumerate(ids)
    ]
    trainer = pl.Trainer(
        strategy="auto" if options is None else SequenceParallelStrategy(**options), **trainer_of_ranks(world), logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, max_epochs=1, precision="64-true",
    )  # fmt: skip
    loader = DataLoader(rows, batch_size=rows_of_a_batch, collate_fn=collated)
    trainer.fit(module, loader, loader)
    weights = {name: _full(each.detach()).clone() for name, each in module.named_parameters()}
    return {"weights": weights, "val": float(trainer.callback_metrics["val"])}
