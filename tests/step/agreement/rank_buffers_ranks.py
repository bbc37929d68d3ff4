"""What each rank runs in test_rank_buffers.py: a model with batch norm on data-parallel ranks, by the strategy and by DDP."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from tests.instruments.record import Record
from tests.trainer.tiny import quiet_trainer

ROWS, STEPS = 4, 6


class Normed(nn.Module):
    """Two layers with a batch norm, an instance norm that tracks, and a buffer that is moved past every version counter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(5, 6), nn.BatchNorm1d(6)
        self.by_row, self.last = nn.InstanceNorm1d(6, track_running_stats=True), nn.Linear(6, 1)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("table", torch.arange(6.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.first(x)).tanh()
        if self.training:
            self.mean.data.mul_(0.9).add_(0.1 * h.detach().mean(0))
        h = self.by_row(torch.stack([h, h * self.table - self.mean, h.square()], -1)).sum(-1)
        return self.last(h).squeeze(-1)


class Module(pl.LightningModule):
    """Fits rows to a number, and notes what its steps give."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = Normed()
        self.losses = Record()
        self.validated: list[float] = []

    def loss(self, rows: Any) -> torch.Tensor:
        x, y = (rows["x"], rows["y"]) if isinstance(rows, dict) else rows
        return (self.net(x) - y).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.append(float(self.loss(batch)))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def rows() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2 * ROWS * STEPS, 5, generator=generator, dtype=torch.float64)
    return [(each, each.sin().sum()) for each in x]


def of_rank(rank: int) -> list[Any]:
    """Return this rank's batches: every other row, as a sampler deals them."""
    data = rows()[rank::2]
    return [[torch.stack(each) for each in zip(*data[i : i + ROWS], strict=True)] for i in range(0, len(data), ROWS)]


def by_ddp(accumulate: int) -> dict[str, Any]:
    """Train as DDP does, with a validation after half of the steps and at the end."""
    module, rank = Module().double(), dist.get_rank()
    ddp = DistributedDataParallel(module.net)
    module.loss = lambda batch: (ddp(batch[0]) - batch[1]).square().mean()  # type: ignore[method-assign]
    optimizer = module.configure_optimizers()
    batches = of_rank(rank)
    for number, batch in enumerate(batches, 1):
        if number % accumulate:
            with ddp.no_sync():
                (module.training_step(batch, 0) / accumulate).backward()
        else:
            (module.training_step(batch, 0) / accumulate).backward()
            optimizer.step()
            optimizer.zero_grad()
        if number % (STEPS // 2) == 0:
            ddp.eval()
            with torch.no_grad():
                module.validation_step(batches[0], 0)
            ddp.train()
    return told(module.net.state_dict(), module)


def told(state: dict[str, torch.Tensor], module: Module) -> dict[str, Any]:
    weights = {name: value.detach().clone() for name, value in state.items()}
    return {"state": weights, "losses": module.losses, "validated": module.validated}


def by_strategy(accumulate: int, compared: bool) -> dict[str, Any]:
    """Train with the strategy, sequences whole.

    Args:
        accumulate: micro-batches.
        compared: whether the preflight takes the rows for sequences, and compares a step.
    """
    module, batches = Module(), of_rank(dist.get_rank())
    if compared:
        batches = [dict(zip("xy", each, strict=True)) for each in batches]
    trainer = quiet_trainer(
        2, strategy=dict(sequence_parallel_size=1, sequence_dims={"x": 1} if compared else None), precision="64-true", max_epochs=1,
        accumulate_grad_batches=accumulate, val_check_interval=STEPS // 2, num_sanity_val_steps=0, use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(batches, batch_size=None), DataLoader(batches[:1], batch_size=None))
    whole = trainer.strategy.lightning_module_state_dict()
    whole = {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in whole.items()}
    moved = trainer.strategy._steps.context.moved_buffers
    return {**told({name.removeprefix("net."): value for name, value in whole.items()}, module), "moved": moved}
