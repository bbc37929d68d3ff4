"""A GAN of signals by manual optimization: a critic of convolutions with a gradient penalty, and R1 in some batches"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.maker = nn.Sequential(nn.Conv1d(3, 8, 3, padding=1), nn.Tanh(), nn.Conv1d(8, 2, 3, padding=1))
        self.critic = nn.Sequential(nn.Conv1d(2, 8, 3, padding=1), nn.LeakyReLU(0.2), nn.Conv1d(8, 8, 3, stride=2))
        self.verdict = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 1))

    def judged(self, signals: Tensor) -> Tensor:
        return self.verdict(self.critic(signals.mT).tanh().mean(-1)).squeeze(-1)

    def slope(self, signals: Tensor) -> Tensor:
        signals = signals.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(self.judged(signals).sum(), signals, create_graph=True)
        return gradient.flatten(1).norm(dim=1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        of_maker, of_critic = self.optimizers()
        real, between = batch["real"], batch["between"][:, None, None]
        self.toggle_optimizer(of_critic)
        with torch.no_grad():
            made = self.maker(batch["noise"].mT).mT
        loss = F.relu(1 - self.judged(real)).mean() + F.relu(1 + self.judged(made)).mean()
        loss = loss + 10 * (self.slope(between * real + (1 - between) * made) - 1).square().mean()
        if batch_idx % 2:
            loss = loss + self.slope(real).square().mean()
        of_critic.zero_grad()
        self.manual_backward(loss)
        of_critic.step()
        self.untoggle_optimizer(of_critic)
        self.toggle_optimizer(of_maker)
        of_maker.zero_grad()
        self.manual_backward(-self.judged(self.maker(batch["noise"].mT).mT).mean())
        of_maker.step()
        self.untoggle_optimizer(of_maker)
        self.log("critic_loss", loss, sync_dist=True)

    def configure_optimizers(self) -> Any:
        critic = [*self.critic.parameters(), *self.verdict.parameters()]
        return torch.optim.Adam(self.maker.parameters(), 1e-2), torch.optim.Adam(critic, 1e-2)


def main(batch_size: int, **options: Any) -> pl.LightningModule:
    drawn = torch.Generator().manual_seed(5)
    samples = [
        {
            "real": torch.randn(20, 2, generator=drawn),
            "noise": torch.randn(20, 3, generator=drawn),
            "between": torch.rand((), generator=drawn),
        }
        for _ in range(12)
    ]
    module = Module()
    pl.Trainer(max_epochs=1, **options).fit(module, DataLoader(samples, batch_size=batch_size))
    return module


LAYOUTS = ["ulysses 2", "ring 2"]
