"""A codebook (VQ-VAE): each frame takes its nearest code, whose averages are buffers that the step moves"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.flows.tiny import Tuned

LAYOUTS = ["ulysses 2", "ring 2"]


class Module(Tuned):
    def __init__(self) -> None:
        super().__init__(nn.Conv1d(2, 8, 3, padding=1))
        self.back = nn.Conv1d(8, 2, 3, padding=1)
        self.register_buffer("codes", torch.randn(6, 8))
        self.register_buffer("counts", torch.ones(6))
        self.register_buffer("sums", self.codes.clone())

    def step(self, batch: Any, name: str) -> Tensor:
        frames = self.model(batch["wave"].mT).mT
        flat = frames.flatten(0, 1)
        used = F.one_hot(torch.cdist(flat, self.codes).argmin(-1), 6).to(flat)
        taken = (used @ self.codes).view_as(frames)
        if self.training:
            with torch.no_grad():
                self.counts.lerp_(used.sum(0), 0.1)
                self.sums.lerp_(used.T @ flat, 0.1)
                self.codes.copy_(self.sums / self.counts[:, None])
        share = used.mean(0)
        self.log(f"{name}_codes", torch.exp(-(share * (share + 1e-10).log()).sum()), sync_dist=True)
        through = frames + (taken - frames).detach()
        return F.mse_loss(self.back(through.mT).mT, batch["wave"]) + 0.25 * F.mse_loss(frames, taken.detach())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.step(batch, "train")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.step(batch, "val"), sync_dist=True)


def main(batch_size: int, **options: Any) -> Any:
    drawn = torch.Generator().manual_seed(5)
    samples = [{"wave": torch.randn(15, 2, generator=drawn)} for _ in range(12)]
    module = Module()
    loaders = DataLoader(samples, batch_size=batch_size), DataLoader(samples[:4], batch_size=batch_size)
    pl.Trainer(max_epochs=1, **options).fit(module, *loaders)
    return module, {"codes": module.codes, "counts": module.counts}
