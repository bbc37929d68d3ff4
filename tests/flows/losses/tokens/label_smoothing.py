"""Next tokens with label smoothing and class weights."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from tests.flows.tiny import VOCABULARY, Tuned, llama, rows


class Module(Tuned):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.model(batch["input_ids"]).logits
        weight = torch.linspace(0.5, 2.0, VOCABULARY, dtype=logits.dtype)
        loss = F.cross_entropy(
            logits.flatten(0, 1), batch["shift_labels"].flatten(), weight=weight, label_smoothing=0.1
        )
        self.log("train_loss", loss)
        return loss


def main(batch_size: int, **options: Any) -> pl.LightningModule:
    module = Module(llama())
    pl.Trainer(max_epochs=1, **options).fit(module, DataLoader(rows(), batch_size=batch_size))
    return module
