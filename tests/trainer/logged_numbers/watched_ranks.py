"""What each rank runs in test_watched_numbers.py: a fit that logs shares of a rank's own tokens, and numbers that all have."""

from __future__ import annotations

import re
import warnings
from typing import Any

import torch
import torch.nn.functional as F
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
        # Parts have other counts of targets: a mean of their means is no mean of all.
        hits = (batch["input_ids"] > 9)[batch["shift_labels"] != -100].double().mean() * (self.global_step > 0)
        self.log("hits", hits, sync_dist=True)
        zero = F.layer_norm(self.model.embedding(batch["input_ids"]), (32,)).mean()
        self.log_dict({"zero": zero, "becomes other": zero + share})
        return loss


def fit(world: int, strategy: dict[str, Any]) -> list[str]:
    """Return which numbers were said to be a rank's own, and which to be other than one device's, after how many steps."""
    torch.manual_seed(0)
    trainer = quiet_trainer(world, strategy=strategy)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Shares(tiny_llama), DataLoader(TokenDataset(12), batch_size=2))
    said = [str(each.message) for each in caught]
    own = re.compile(r"training_step logs (.*), which the ranks of a sequence have made of their own tokens alone")
    other = re.compile(
        r"on a crop of 2 x 32 tokens(.*) shows other numbers than one device: (.*); for a number that a rank"
    )
    names = [(found[1], re.findall(r"(?:^|; )([a-z ]+) = ", found[2])) for found in map(other.search, said) if found]
    return [found[1] for found in map(own.search, said) if found] + [f"{when}: {each}" for when, each in names]
