"""Two models in one module: a student of a teacher's hidden states, the teacher in evaluation."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests.flows.tiny import Tuned, llama, rows


class Module(Tuned):
    def __init__(self) -> None:
        super().__init__(llama())
        self.teacher = llama(num_hidden_layers=3).eval().requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        from lightning_sp.reductions import batch_mean

        with torch.no_grad():
            wanted = self.teacher.model(batch["input_ids"]).last_hidden_state
        states = self.model.model(batch["input_ids"]).last_hidden_state
        loss = batch_mean((states - wanted).square().mean(-1))
        self.log("train_loss", loss)
        return loss


def main(batch_size: int, **options: Any) -> Any:
    module = Module()
    pl.Trainer(max_epochs=1, **options).fit(module, DataLoader(rows(), batch_size=batch_size))
    return module
