"""What each rank runs in test_failed_forward.py: layers of the LightningModule itself, and forwards that end by an error in the middle."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_sp.testing import max_error
from tests.trainer.tiny import _full, quiet_trainer

ROWS = torch.randn(8, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Module(pl.LightningModule):
    """Fails on rows of another length, as the preflight's shorter crop has; and where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 2)
        self.fails_at = -1

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if self.fails_at == self.trainer.global_step:
            raise ArithmeticError("my own error")
        return self.layer(rows)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fitted(fails_at: int) -> float:
    """Fit, a second time where the first fit fails at a step; return the error of the weights by those of one process."""
    torch.manual_seed(0)
    module = Module().double()
    alone = nn.Linear(32, 2).double()
    alone.load_state_dict({name: value.clone() for name, value in module.layer.state_dict().items()})
    trained = [*range(max(fails_at, 0)), *range(4)]
    for step in trained:
        loss = alone(ROWS[2 * step : 2 * step + 2]).square().mean()
        for parameter, gradient in zip(
            alone.parameters(), torch.autograd.grad(loss, [*alone.parameters()]), strict=True
        ):
            parameter.data -= 0.1 * gradient
    for module.fails_at in [fails_at] * (fails_at >= 0) + [-1]:
        trainer = quiet_trainer(2, strategy={"data_parallel_size": 2})
        try:
            trainer.fit(module, DataLoader(ROWS, batch_size=1))
        except ArithmeticError:
            assert module.fails_at >= 0
    return max(
        max_error(_full(value.detach()), alone.state_dict()[name]) for name, value in module.layer.named_parameters()
    )
