"""Gradients clipped by value, and a norm of them logged in a hook."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from tests.flows.tiny import Tuned, llama, rows


class Module(Tuned):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.model(batch["input_ids"]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten())
        self.log("train_loss", loss)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in self.parameters()]
        self.log("grad_norm", torch.linalg.vector_norm(torch.stack([each.norm() for each in norms])))


def main(batch_size: int, **options: Any) -> Any:
    module = Module(llama())
    trainer = pl.Trainer(max_epochs=1, gradient_clip_val=0.01, gradient_clip_algorithm="value", **options)
    trainer.fit(module, DataLoader(rows(), batch_size=batch_size))
    return module
