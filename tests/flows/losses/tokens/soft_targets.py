"""Cross entropy with class probabilities of a teacher."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from tests.flows.tiny import Tuned, llama, rows


class Module(Tuned):
    def __init__(self) -> None:
        super().__init__(llama())
        self.teacher = llama().requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.model(batch["input_ids"]).logits
        with torch.no_grad():
            wanted = self.teacher(batch["input_ids"]).logits.softmax(-1)
        loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(0, 1))
        self.log("train_loss", loss)
        return loss


def main(batch_size: int, **options: Any) -> pl.LightningModule:
    module = Module()
    pl.Trainer(max_epochs=1, **options).fit(module, DataLoader(rows(), batch_size=batch_size))
    return module
