"""A moving average of the weights by hand: validation swaps it in at its start and out at its end; layers of the module's own."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.flows.tiny import VOCABULARY, llama, rows


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = llama().model
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, VOCABULARY)

    def loss(self, batch: Any) -> Tensor:
        logits = self.head(self.norm(self.model(batch["input_ids"]).last_hidden_state))
        return F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def on_fit_start(self) -> None:
        self.weights = list(self.parameters())
        self.average = [p.detach().clone() for p in self.weights]

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for average, p in zip(self.average, self.weights, strict=True):
                average.lerp_(p.detach(), 0.3)

    def swap(self, weights: Any) -> None:
        with torch.no_grad():
            for average, p in zip(self.average, weights, strict=True):
                current = p.detach().clone()
                p.copy_(average)
                average.copy_(current)

    def on_validation_epoch_start(self) -> None:
        self.swap(self.parameters())

    def on_validation_epoch_end(self) -> None:
        self.swap(self.weights)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def main(batch_size: int, **options: Any) -> Any:
    module = Module()
    loader, validation = DataLoader(rows(), batch_size=batch_size), DataLoader(rows(8), batch_size=batch_size)
    pl.Trainer(max_epochs=2, val_check_interval=1, **options).fit(module, loader, validation)
    return module
