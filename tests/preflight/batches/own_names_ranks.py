"""What the ranks of test_own_names run: a series under a name of its own, trained, and validated between two epochs."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.trainer.tiny import _full, plain_trainer, quiet_trainer


class Series(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.behind = nn.Linear(1, 8), nn.Linear(8, 1)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        values = batch["values"]
        x = self.before(values[..., None])[:, None]
        found = self.behind(F.scaled_dot_product_attention(x, x, x)).flatten(1)
        return (found[:, :-1] - values[:, 1:]).square().mean()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(world: int) -> dict[str, Tensor]:
    """Return the weights behind two epochs of four steps each."""
    torch.manual_seed(3)
    module, options = Series(), {"max_epochs": 2}
    rows = torch.randn(8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    loader = DataLoader([{"values": row} for row in rows], batch_size=2)
    own = {"num_sanity_val_steps": 0, **options}
    trainer = quiet_trainer(world, strategy={"global_view": "auto"}, **options) if world > 1 else plain_trainer(**own)
    trainer.fit(module, loader, DataLoader([{"values": row} for row in rows[:2]], batch_size=2))
    return {name: _full(each.detach()).clone() for name, each in module.named_parameters()}
