"""A weight for each token, in a batch entry of its own name."""

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
        from lightning_sp.reductions import batch_mean

        logits = self.model(batch["input_ids"]).logits
        each = F.cross_entropy(logits.movedim(-1, 1), batch["shift_labels"], reduction="none")
        loss = batch_mean(each, batch["loss_weights"])
        self.log("train_loss", loss)
        return loss


def main(batch_size: int, **options: Any) -> pl.LightningModule:
    samples = [{**row, "loss_weights": torch.linspace(0.0, 1.0, 18)} for row in rows()]
    module = Module(llama())
    pl.Trainer(max_epochs=1, **options).fit(module, DataLoader(samples, batch_size=batch_size))
    return module
