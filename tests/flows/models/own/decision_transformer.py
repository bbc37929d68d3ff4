"""Decision Transformer: returns, states and actions one after the other in one sequence of three tokens for each time, actions in classes."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

STRATEGY = {"sequence_dims": {"returns": 1, "states": 1, "actions": 1}}
TIMES, ACTIONS = 15, 6


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.returns, self.states, self.actions = nn.Linear(1, 16), nn.Linear(5, 16), nn.Embedding(ACTIONS, 16)
        self.times, self.qkv, self.out, self.head = (
            nn.Embedding(64, 16),
            nn.Linear(16, 48),
            nn.Linear(16, 16),
            nn.Linear(16, ACTIONS),
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        rows, times = batch["actions"].shape
        at = self.times(torch.arange(times, device=self.device))
        parts = self.returns(batch["returns"]), self.states(batch["states"]), self.actions(batch["actions"])
        x = torch.stack([each + at for each in parts], dim=1).permute(0, 2, 1, 3).reshape(rows, 3 * times, 16)
        q, k, v = (each.view(rows, 3 * times, 4, 4).transpose(1, 2) for each in self.qkv(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(rows, 3 * times, 16)
        x = (x + self.out(y)).reshape(rows, times, 3, 16).permute(0, 2, 1, 3)
        loss = F.cross_entropy(self.head(x[:, 1]).flatten(0, 1), batch["actions"].flatten())
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def rows(number: int = 12) -> list[dict[str, Tensor]]:
    g = torch.Generator().manual_seed(0)
    return [
        {
            "returns": torch.randn(TIMES, 1, generator=g, dtype=torch.float64),
            "states": torch.randn(TIMES, 5, generator=g, dtype=torch.float64),
            "actions": torch.randint(ACTIONS, (TIMES,), generator=g),
        }
        for _ in range(number)
    ]


def main(batch_size: int, **options: Any) -> Any:
    module = Module()
    pl.Trainer(max_epochs=1, **options).fit(module, DataLoader(rows(), batch_size=batch_size))
    return module
