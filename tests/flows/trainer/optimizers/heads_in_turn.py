"""Heads used in turn, every second step of the optimizer left out, and a count of missing gradients in a hook."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.flows.tiny import VOCABULARY, Tuned, llama, rows


class Module(Tuned):
    def __init__(self) -> None:
        super().__init__(llama())
        self.heads = nn.ModuleList(nn.Linear(32, VOCABULARY) for _ in range(3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.model.model(batch["input_ids"]).last_hidden_state
        logits = self.heads[batch_idx % 2](hidden)
        return F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten())

    def on_after_backward(self) -> None:
        self.log("missing", float(sum(p.grad is None for p in self.parameters())))
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.clamp_(-0.01, 0.01)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx % 2 == 0:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)


def main(batch_size: int, **options: Any) -> Any:
    torch.manual_seed(5)
    module = Module()
    pl.Trainer(max_epochs=1, **options).fit(module, DataLoader(rows(20, 16), batch_size=batch_size))  # type: ignore[arg-type]
    return module
