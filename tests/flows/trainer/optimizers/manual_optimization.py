"""Manual optimization: two optimizers, the model's and its head's, stepped by hand."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from tests.flows.tiny import Tuned, llama, rows


class Module(Tuned):
    def __init__(self) -> None:
        super().__init__(llama())
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        body, head = self.optimizers()
        logits = self.model(batch["input_ids"]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten())
        body.zero_grad()
        head.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(body, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        body.step()
        if batch_idx % 2 == 0:
            head.step()
        self.log("train_loss", loss)

    def configure_optimizers(self) -> Any:
        head = self.model.lm_head.weight
        body = [p for p in self.parameters() if p is not head]
        return torch.optim.AdamW(body, lr=1e-2), torch.optim.SGD([head], lr=0.1)


def main(batch_size: int, **options: Any) -> pl.LightningModule:
    module = Module()
    pl.Trainer(max_epochs=1, **options).fit(module, DataLoader(rows(), batch_size=batch_size))
    return module
