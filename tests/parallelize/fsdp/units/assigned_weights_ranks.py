"""What the ranks of test_assigned_weights run."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.instruments.record import Record
from tests.trainer.lightning_ranks import trainer_of
from tests.trainer.tiny import _full


class Momentum(pl.LightningModule):
    """Tokens whose keys come from weights that follow others within the step, as MoCo is written."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(11, 8), nn.Conv1d(8, 8, 3, padding=1)
        self.query, self.key = nn.Linear(8, 4), nn.Linear(8, 4).requires_grad_(False)
        self.losses = Record()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        state = self.mix(self.embed(batch["input_ids"]).mT).mT
        with torch.no_grad():
            for own, follower in zip(self.query.parameters(), self.key.parameters(), strict=True):
                follower.data = follower.data * 0.9 + own.data * 0.1
        loss = F.mse_loss(self.query(state), self.key(state.detach()))
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(world: int, strategy: dict[str, Any] | None) -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses and the weights of three steps."""
    torch.manual_seed(3)
    module = Momentum()
    rows = [{"input_ids": torch.randint(11, (16,))} for _ in range(6)]
    trainer_of(strategy, world, max_steps=3).fit(module, DataLoader(rows, batch_size=2))  # type: ignore[arg-type]
    return module.losses, {name: _full(each.detach()).clone() for name, each in module.named_parameters()}
