"""Batches of one's own names: x, y and weights of tokens."""

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
        logits = self.model(batch["x"]).logits
        kept = batch["y"].masked_fill(~batch["keep"], -100)
        loss = F.cross_entropy(logits.flatten(0, 1), kept.flatten())
        self.log("train_loss", loss)
        return loss


def main(batch_size: int, **options: Any) -> pl.LightningModule:
    torch.manual_seed(5)
    samples = [
        {"x": row["input_ids"], "y": row["shift_labels"], "keep": torch.rand(16) < 0.7, "source": i}
        for i, row in enumerate(rows(length=16))
    ]
    module = Module(llama())
    pl.Trainer(max_epochs=1, **options).fit(module, DataLoader(samples, batch_size=batch_size))  # type: ignore[arg-type]
    return module
