"""A target that follows a head inside training_step, as BYOL's does: layers of the module itself, and deeper ones."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_sp.reductions import batch_mean
from tests.flows.tiny import Tuned, llama, rows


class Module(Tuned):
    def __init__(self) -> None:
        super().__init__(llama())
        self.head, self.deep = nn.Linear(32, 8), nn.Sequential(nn.Linear(32, 8))
        self.target = nn.Linear(32, 8).requires_grad_(False)
        self.deep_target = nn.Sequential(nn.Linear(32, 8)).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        output = self.model(batch["input_ids"], output_hidden_states=True)
        loss = F.cross_entropy(output.logits.flatten(0, 1), batch["shift_labels"].flatten())
        for head, target in ((self.head, self.target), (self.deep, self.deep_target)):
            off = head(output.hidden_states[-1]) - target(output.hidden_states[-1].detach())
            loss = loss + batch_mean(off.square().mean(-1))
        with torch.no_grad():
            for moved, by in ((self.target, self.head), (self.deep_target, self.deep)):
                for old, new in zip(moved.parameters(), by.parameters(), strict=True):
                    old.lerp_(new, 0.2)
        self.log("train_loss", loss)
        return loss


def main(batch_size: int, **options: Any) -> Any:
    torch.manual_seed(4)
    module = Module()
    pl.Trainer(max_epochs=1, **options).fit(module, DataLoader(rows(), batch_size=batch_size))
    return module
