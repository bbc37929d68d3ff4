"""Double backpropagation: how much the classes of tokens change with the signal is added to the loss, by a network of convolutions"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.flows.tiny import Tuned


class Module(Tuned):
    def __init__(self) -> None:
        super().__init__(
            nn.Sequential(
                nn.Conv1d(3, 8, 3, padding=1),
                nn.Tanh(),
                nn.Sequential(nn.Conv1d(8, 8, 3, padding=1), nn.Tanh(), nn.Conv1d(8, 4, 1)),
            )
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        signal = batch["signal"].requires_grad_()
        logits = self.model(signal.mT)
        (gradient,) = torch.autograd.grad(logits.logsumexp(1).sum(), signal, create_graph=True)
        loss = F.cross_entropy(logits, batch["classes"]) + gradient.flatten(1).norm(dim=1).mean()
        self.log("train_loss", loss, sync_dist=True)
        return loss


def main(batch_size: int, **options: Any) -> pl.LightningModule:
    drawn = torch.Generator().manual_seed(5)
    samples = [
        {"signal": torch.randn(18, 3, generator=drawn), "classes": torch.randint(4, (18,), generator=drawn)}
        for _ in range(12)
    ]
    module = Module()
    pl.Trainer(max_epochs=1, **options).fit(module, DataLoader(samples, batch_size=batch_size))
    return module
