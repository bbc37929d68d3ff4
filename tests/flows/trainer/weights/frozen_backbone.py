"""A frozen body and a trained head, thawed after an epoch by a callback."""

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

    def on_train_epoch_start(self) -> None:
        for p in self.model.model.parameters():
            p.requires_grad_(self.current_epoch > 0)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main(batch_size: int, **options: Any) -> Any:
    module = Module(llama())
    pl.Trainer(max_epochs=2, **options).fit(module, DataLoader(rows(), batch_size=batch_size))
    return module
