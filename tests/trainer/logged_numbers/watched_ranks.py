"""What each rank runs in test_watched_numbers.py: a fit that logs shares of a rank's own tokens, and numbers that all have."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.utils.data import DataLoader

from tests.trainer.tiny import Plain, TokenDataset, quiet_trainer, tiny_llama


class Shares(Plain):
    """The shares are 0 whole and sharded in the first step, an accuracy's of an untrained model; synchronized ones are Lightning's."""

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        share = (batch["input_ids"] > 9).double().mean() * (self.global_step > 0)
        self.log("share", share)
        self.log_dict({"synchronized": share}, sync_dist=True)
        self.log("rate", 0.5)
        return loss


def fit(world: int, strategy: dict[str, Any]) -> list[str]:
    """Return what was said of numbers that are a rank's own."""
    torch.manual_seed(0)
    trainer = quiet_trainer(world, strategy=strategy)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Shares(tiny_llama), DataLoader(TokenDataset(12), batch_size=2))
    return [str(each.message) for each in caught if "of their own tokens alone" in str(each.message)]
