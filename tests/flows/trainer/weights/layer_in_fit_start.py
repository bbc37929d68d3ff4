"""A layer that on_fit_start puts into the model and gives to the optimizer, without the preflight."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.flows.tiny import VOCABULARY, Tuned, llama, rows

STRATEGY = {"preflight": False}


class Module(Tuned):
    def on_fit_start(self) -> None:
        torch.manual_seed(1)
        self.scale = nn.Linear(VOCABULARY, VOCABULARY).to(next(self.parameters()).dtype)
        self.trainer.optimizers[0].add_param_group({"params": [*self.scale.parameters()]})

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.scale(self.model(batch["input_ids"]).logits)
        loss = F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten())
        self.log("train_loss", loss)
        return loss


def main(batch_size: int, **options: Any) -> Any:
    module = Module(llama())
    pl.Trainer(max_epochs=1, **options).fit(module, DataLoader(rows(), batch_size=batch_size))
    return module
