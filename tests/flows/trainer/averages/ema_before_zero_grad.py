"""A moving average that follows between a step's forward and its backward, in `on_before_zero_grad`: a layer of the module's own, and a body"""

from __future__ import annotations

import copy
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.flows.tiny import VOCABULARY, Tuned, llama, rows


class Module(Tuned):
    def __init__(self) -> None:
        super().__init__(llama().model)
        self.head = nn.Linear(32, VOCABULARY)
        self.slow_head, self.slow_model = (
            copy.deepcopy(each).requires_grad_(False) for each in (self.head, self.model)
        )

    def loss(self, model: nn.Module, head: nn.Module, batch: Any) -> Tensor:
        logits = head(model(batch["input_ids"]).last_hidden_state)
        return F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(self.model, self.head, batch)
        self.log("train_loss", loss)
        return loss

    @torch.no_grad()
    def on_before_zero_grad(self, optimizer: Any) -> None:
        for slow, fast in ((self.slow_head, self.head), (self.slow_model, self.model)):
            for a, b in zip(slow.parameters(), fast.parameters(), strict=True):
                a.sub_(0.2 * (a - b))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(self.slow_model, self.slow_head, batch), sync_dist=True)


def main(batch_size: int, **options: Any) -> Any:
    module = Module()
    loaders = DataLoader(rows(), batch_size=batch_size), DataLoader(rows(8), batch_size=batch_size)
    pl.Trainer(max_epochs=1, **options).fit(module, *loaders)
    return module
