"""Distillation: the KL divergence to a frozen teacher of another size, over all tokens."""

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
    def __init__(self) -> None:
        super().__init__(llama())
        self.teacher = llama(hidden_size=48, num_attention_heads=6).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        student = F.log_softmax(self.model(batch["input_ids"]).logits, -1)
        with torch.no_grad():
            teacher = F.log_softmax(self.teacher(batch["input_ids"]).logits, -1)
        loss = batch_mean(F.kl_div(student, teacher, reduction="none", log_target=True).sum(-1))
        self.log("train_loss", loss)
        return loss


def main(batch_size: int, **options: Any) -> pl.LightningModule:
    module = Module()
    pl.Trainer(max_epochs=1, **options).fit(module, DataLoader(rows(), batch_size=batch_size))
    return module
