"""A masked autoencoder: patches in a drawn order, a few are read, a token stands for the others, and all come back to their places"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.flows.tiny import Tuned


def block() -> nn.Module:
    return nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True, norm_first=True)


class Module(Tuned):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 16))
        self.reader, self.writer, self.out = block(), block(), nn.Linear(16, 4)
        self.absent, self.first = nn.Parameter(torch.randn(1, 1, 16)), nn.Parameter(torch.randn(1, 1, 16))
        self.places = nn.Parameter(0.1 * torch.randn(1, 16, 16))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        patches = batch["patches"]
        rows, number, _ = patches.shape
        order = batch["drawn"].argsort(1)
        back = order.argsort(1)
        states = self.model(patches) + self.places
        read = states.gather(1, order[:, :6, None].expand(-1, -1, 16))
        read = self.reader(torch.cat([self.first.expand(rows, -1, -1), read], 1))
        both = torch.cat([read[:, 1:], self.absent.expand(rows, number - 6, -1)], 1)
        both = both.gather(1, back[..., None].expand(-1, -1, 16)) + self.places
        found = self.out(self.writer(torch.cat([read[:, :1], both], 1)))[:, 1:]
        hidden = (back >= 6).to(found)
        loss = ((found - patches).square().mean(-1) * hidden).sum() / hidden.sum()
        self.log("train_loss", loss, sync_dist=True)
        return loss


def main(batch_size: int, **options: Any) -> pl.LightningModule:
    drawn = torch.Generator().manual_seed(5)
    samples = [
        {"patches": torch.randn(16, 4, generator=drawn), "drawn": torch.rand(16, generator=drawn)} for _ in range(12)
    ]
    module = Module()
    pl.Trainer(max_epochs=1, **options).fit(module, DataLoader(samples, batch_size=batch_size))
    return module
