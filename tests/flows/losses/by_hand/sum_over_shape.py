"""torch's sum of the losses divided by the shape of the batch."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from tests.flows.tiny import Tuned, llama, rows

# Of data-parallel groups each logs its own number, as under DDP.
LAYOUTS = ["ulysses 2", "ring 2"]


class Module(Tuned):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.model(batch["input_ids"]).logits
        total = F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten(), reduction="sum")
        loss = total / batch["input_ids"].numel()
        self.log("train_loss", loss)
        return loss


def main(batch_size: int, **options: Any) -> pl.LightningModule:
    module = Module(llama())
    pl.Trainer(max_epochs=1, **options).fit(module, DataLoader(rows(), batch_size=batch_size))
    return module
