"""Loaders of empty data sets: what each rank runs in test_empty_loaders.py."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader

from lightning_sp import SequenceParallelError
from tests.trainer.tiny import Plain, TokenDataset, plain_trainer, quiet_trainer, tiny_llama


class Several(Plain):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", super().training_step(batch, batch_idx), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> torch.Tensor:
        return self.logits(batch)


def run(world: int, groups: int) -> dict[str, Any]:
    """Train with an empty loader among those of the validation, predict one; then train on one. Of no world: one device."""
    torch.manual_seed(0)
    rows, none = TokenDataset(4), DataLoader(TokenDataset(0), batch_size=2)
    module, options = Several(tiny_llama), {"max_epochs": 1, "num_sanity_val_steps": 0}
    strategy = {"data_parallel_size": groups, "preflight": False}
    trainer = quiet_trainer(world, strategy=strategy, **options) if world else plain_trainer(**options)
    trainer.fit(module, DataLoader(rows, batch_size=4 // groups), [none, DataLoader(rows, batch_size=2)])
    metrics = {name: float(each) for name, each in trainer.callback_metrics.items() if "val" in name}
    found = {"metrics": metrics, "predicted": trainer.predict(module, none), "said": ""}
    try:
        trainer.fit_loop.max_epochs = 2
        trainer.fit(module, none)
    except SequenceParallelError as error:
        found["said"] = str(error)
    return found
