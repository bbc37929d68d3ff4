"""A policy gradient (GRPO): an advantage for each row, ratios clipped, a mean over the answers' tokens."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_sp.reductions import batch_mean
from tests.flows.tiny import Tuned, llama, rows

STRATEGY = {"sequence_dims": {"old_log_probs": 1, "answer_mask": 1}}


class Module(Tuned):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.model(batch["input_ids"]).logits
        new = -F.cross_entropy(logits.movedim(-1, 1), batch["shift_labels"], reduction="none")
        ratio = torch.exp(new - batch["old_log_probs"])
        advantage = batch["advantage"][:, None]
        each = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        loss = batch_mean(each, batch["answer_mask"])
        self.log("train_loss", loss)
        return loss


def main(batch_size: int, **options: Any) -> pl.LightningModule:
    g = torch.Generator().manual_seed(4)
    samples = [
        {
            **row,
            "old_log_probs": -4 + torch.rand(20, generator=g),
            "advantage": torch.randn((), generator=g),
            "answer_mask": (torch.arange(20) > 5).long(),
        }
        for row in rows(length=20)
    ]
    module = Module(llama())
    pl.Trainer(max_epochs=1, **options).fit(module, DataLoader(samples, batch_size=batch_size))
    return module
