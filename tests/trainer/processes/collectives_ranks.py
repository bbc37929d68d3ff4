"""What each rank runs in test_collectives.py: a module that adds up and gathers numbers by torch.distributed itself."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.distributed.nn.functional
import torch.nn.functional as F
from torch import nn
from torch.distributed import all_reduce
from torch.utils.data import DataLoader

from lightning_sp.errors import SequenceParallelError
from tests.trainer.tiny import Plain, TokenDataset, quiet_trainer, tiny_llama


def _listed(x: torch.Tensor) -> torch.Tensor:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x)
    return torch.stack(parts).sum()


def _objects(x: torch.Tensor) -> torch.Tensor:
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, float(x))
    return torch.tensor(sum(parts))


def _reduced(x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
    dist.all_reduce(x, *args, **options)
    return x


def _bound(x: torch.Tensor) -> torch.Tensor:
    all_reduce(x)
    return x


ADDS: dict[str, Any] = {
    "all_reduce": lambda module, x: _reduced(x),
    "by its name": lambda module, x: _bound(x),
    "differentiable": lambda module, x: torch.distributed.nn.functional.all_reduce(x),
    "all_gather": lambda module, x: _listed(x),
    "all_gather_object": lambda module, x: _objects(x),
    "largest": lambda module, x: _reduced(x, dist.ReduceOp.MAX),
    "mean": lambda module, x: _reduced(x, op=dist.ReduceOp.AVG),
    "data-parallel": lambda module, x: _reduced(x, group=module.trainer.strategy.data_parallel_group),
    "self.all_gather": lambda module, x: module.all_gather(x).sum(),
    "every rank": lambda module, x: _reduced(x, group=dist.group.WORLD),
}


class Counting(Plain):
    """Counts the tokens of each step, and adds them up over ranks in a hook."""

    how, found = "", 0.0

    def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
        self.tokens = batch["input_ids"].ge(0).sum().double()
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *_: Any) -> None:
        self.found = float(ADDS[self.how](self, torch.tensor(float(self.tokens), dtype=torch.float64)))


class Pictures(pl.LightningModule):
    """Counts the pictures of each step: batches without a sequence."""

    how = ""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.found = nn.Linear(48, 5), list[float]()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        pixels, classes = batch
        return F.cross_entropy(self.layer(pixels.flatten(1)), classes)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.found.append(float(ADDS[self.how](self, torch.tensor(float(len(batch[1])), dtype=torch.float64))))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit_pictures(how: str, world: int) -> dict[str, Any]:
    """Train two steps on pictures; return the numbers, and what was said."""
    torch.manual_seed(0)
    module = Pictures()
    module.how = how
    trainer, said = quiet_trainer(world, strategy={"sequence_parallel_size": 2}, max_steps=2), ""
    rows = [(torch.randn(3, 4, 4).double(), torch.tensor(index % 5)) for index in range(3 * world)]
    try:
        trainer.fit(module, DataLoader(rows, batch_size=3))
    except SequenceParallelError as error:
        said = str(error)
    return {"said": said, "found": module.found}


def fit(how: str, world: int, strategy: dict[str, Any]) -> dict[str, Any]:
    """Train a step; return the number, and what was said."""
    torch.manual_seed(0)
    module: Any = Counting(tiny_llama)
    module.how = how
    trainer = quiet_trainer(world, strategy={"preflight": False, **strategy}, max_steps=1)
    said = ""
    try:
        trainer.fit(module, DataLoader(TokenDataset(8), batch_size=2))
    except SequenceParallelError as error:
        said = str(error)
    return {"said": said, "found": module.found, "tokens": float(module.tokens)}
