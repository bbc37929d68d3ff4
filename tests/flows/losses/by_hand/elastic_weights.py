"""Elastic weight consolidation: weights are held near those of an earlier task, each by its Fisher information"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from tests.flows.tiny import Tuned, llama, rows


class Module(Tuned):
    def remember(self) -> None:
        """Keep the weights of the earlier task, and how much each matters."""
        drawn = torch.Generator().manual_seed(0)
        self.old = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self.fisher = {name: torch.rand(p.shape, generator=drawn) for name, p in self.model.named_parameters()}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.model(input_ids=batch["input_ids"]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten())
        for name, p in self.model.named_parameters():
            loss = loss + 5.0 * (self.fisher[name].to(p) * (p - self.old[name].to(p)).pow(2)).sum()
        self.log("loss", loss)
        return loss


def main(batch_size: int, **options: Any) -> Any:
    torch.manual_seed(0)
    module = Module(llama())
    module.remember()
    pl.Trainer(max_epochs=2, **options).fit(module, DataLoader(rows(), batch_size=batch_size))
    return module, {}
