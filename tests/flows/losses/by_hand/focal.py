"""A focal loss by hand: tokens that are known already weigh less."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_sp.reductions import batch_mean
from tests.flows.tiny import Tuned, llama, rows


class Module(Tuned):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.model(batch["input_ids"]).logits
        each = F.cross_entropy(logits.movedim(-1, 1), batch["shift_labels"], reduction="none")
        loss = batch_mean((1 - torch.exp(-each)) ** 2 * each, batch["shift_labels"] != -100)
        self.log("train_loss", loss)
        return loss


def main(batch_size: int, **options: Any) -> pl.LightningModule:
    module = Module(llama())
    pl.Trainer(max_epochs=1, **options).fit(module, DataLoader(rows(), batch_size=batch_size))
    return module
