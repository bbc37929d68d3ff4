"""Several next tokens at once, by heads of their own."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_sp.reductions import shift
from tests.flows.tiny import VOCABULARY, Tuned, llama, rows


class Module(Tuned):
    def __init__(self) -> None:
        super().__init__(llama())
        self.heads = torch.nn.ModuleList(torch.nn.Linear(32, VOCABULARY) for _ in range(2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        states, targets = self.model.model(batch["input_ids"]).last_hidden_state, batch["shift_labels"]
        loss = F.cross_entropy(self.model.lm_head(states).flatten(0, 1), targets.flatten())
        for ahead, head in enumerate(self.heads, 1):
            loss = loss + 0.3 * F.cross_entropy(head(states).flatten(0, 1), shift(targets, ahead, -100).flatten())
        self.log("train_loss", loss)
        return loss


def main(batch_size: int, **options: Any) -> pl.LightningModule:
    module = Module()
    pl.Trainer(max_epochs=1, **options).fit(module, DataLoader(rows(), batch_size=batch_size))
    return module
