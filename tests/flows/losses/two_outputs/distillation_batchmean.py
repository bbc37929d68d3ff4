"""Distillation by torch's own F.kl_div(reduction='batchmean')."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from tests.flows.tiny import Tuned, llama, rows

# Of data-parallel groups the losses are averaged, as DDP does.
LAYOUTS = ["ulysses 2", "ring 2"]


class Module(Tuned):
    def __init__(self) -> None:
        super().__init__(llama())
        self.teacher = llama().requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        student = F.log_softmax(self.model(batch["input_ids"]).logits, -1).flatten(0, 1)
        with torch.no_grad():
            teacher = F.softmax(self.teacher(batch["input_ids"]).logits, -1).flatten(0, 1)
        loss = F.kl_div(student, teacher, reduction="batchmean")
        self.log("train_loss", loss)
        return loss


def main(batch_size: int, **options: Any) -> pl.LightningModule:
    module = Module()
    pl.Trainer(max_epochs=1, **options).fit(module, DataLoader(rows(), batch_size=batch_size))
    return module
