"""A regression of a number for each row, from the last token's state."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_sp.reductions import last_token
from tests.flows.tiny import Tuned, llama, rows


class Module(Tuned):
    def __init__(self) -> None:
        super().__init__(llama())
        self.head = torch.nn.Linear(32, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        states = self.model.model(batch["input_ids"]).last_hidden_state
        loss = F.mse_loss(self.head(last_token(states))[:, 0], batch["wanted"])
        self.log("train_loss", loss, sync_dist=True)
        return loss


def main(batch_size: int, **options: Any) -> pl.LightningModule:
    samples = [{**row, "wanted": torch.tensor(i / 12)} for i, row in enumerate(rows())]
    module = Module()
    pl.Trainer(max_epochs=1, **options).fit(module, DataLoader(samples, batch_size=batch_size))
    return module
