"""An exponential moving average of the weights, updated in a hook, validated with."""

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

    def on_fit_start(self) -> None:
        self.average = [p.detach().clone() for p in self.parameters()]

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for average, p in zip(self.average, self.parameters(), strict=True):
                average.lerp_(p.detach(), 0.1)

    def on_train_end(self) -> None:
        with torch.no_grad():
            for average, p in zip(self.average, self.parameters(), strict=True):
                p.copy_(average)


def main(batch_size: int, **options: Any) -> Any:
    module = Module(llama())
    pl.Trainer(max_epochs=1, **options).fit(module, DataLoader(rows(), batch_size=batch_size))
    return module
