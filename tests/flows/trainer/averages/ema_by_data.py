"""A moving average by `parameter.data = ...`: backed up and put in for validation, put back after it; a head normalised so in its step."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.flows.tiny import VOCABULARY, Tuned, llama, rows


class Module(Tuned):
    def __init__(self) -> None:
        super().__init__(llama().model)
        self.head = nn.Linear(32, VOCABULARY)
        self.validated: list[Tensor] = []

    def loss(self, batch: Any) -> Tensor:
        logits = self.head(self.model(batch["input_ids"]).last_hidden_state)
        return F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten())

    def on_fit_start(self) -> None:
        self.shadow = {name: p.data.clone() for name, p in self.named_parameters()}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.head.weight.data = self.head.weight.data / self.head.weight.data.norm(dim=0).clamp(min=1)
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        for name, parameter in self.named_parameters():
            self.shadow[name] = 0.8 * self.shadow[name] + 0.2 * parameter.data

    def on_validation_epoch_start(self) -> None:
        self.backup = {}
        for name, parameter in self.named_parameters():
            self.backup[name] = parameter.data
            parameter.data = self.shadow[name]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        for name, parameter in self.named_parameters():
            parameter.data = self.backup[name]


def main(batch_size: int, **options: Any) -> Any:
    module = Module()
    trainer = pl.Trainer(max_epochs=2, **options)
    trainer.fit(module, DataLoader(rows(), batch_size=batch_size), DataLoader(rows(), batch_size=batch_size))
    return module, {"val_loss": trainer.callback_metrics["val_loss"]}
