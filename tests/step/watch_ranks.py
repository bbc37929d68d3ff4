"""Runs in ranks: fits whose loss becomes nan in one layer, and fits whose replicas come apart."""

from __future__ import annotations

import os
import tempfile
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_sp.comm import failure
from lightning_sp.step.agreement import replicas
from tests.trainer.tiny import Plain, TokenDataset, quiet_trainer, steps_of, tiny_llama

BAD_STEP = 2
# Counts runs of the step that fails, where nothing puts it back.
RUNS = "RUNS_OF_FAILING_STEP"


def has_run() -> bool:
    number = int(os.environ.get(RUNS, "0"))
    os.environ[RUNS] = str(number + 1)
    return number > 0


class Divides(nn.Module):
    """Divides by 0 for one token of the whole sequence, once it is told to."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at, self.on = at, False

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        if not self.on:
            return x
        return torch.where((position_ids == self.at).unsqueeze(-1), x / 0.0, x)


class Model(nn.Module):
    def __init__(self, at: int) -> None:
        super().__init__()
        self.body, self.divides = tiny_llama(num_layers=2), Divides(at)
        self.again = nn.Linear(61, 61)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        return self.again(self.divides(self.body(input_ids, position_ids), position_ids))


class Fails(Plain):
    """Its loss is nan from one step on, by a layer, by a weight or by the step itself; it takes its targets out of the batch."""

    def __init__(self, kind: str) -> None:
        super().__init__(lambda: Model(at=13))
        self.kind, self.num_forwards = kind, 0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if steps_of(self.trainer) == BAD_STEP:
            self.model.divides.on = self.kind == "layer"
            if self.kind == "weight":
                with torch.no_grad():
                    self.model.body.layers[1].attention_norm.weight.fill_(float("nan"))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        targets = batch.pop("shift_labels")
        self.num_forwards += 1
        bad = steps_of(self.trainer) == BAD_STEP
        if bad and self.kind == "another batch" and has_run():
            raise KeyError("what the first run took")
        if bad and self.kind == "rank 1" and has_run() and self.trainer.global_rank == 1:
            raise MemoryError("on this rank alone")
        logits = self.logits(batch)
        if bad and self.kind == "targets":
            targets = torch.full_like(targets, -100)
        if steps_of(self.trainer) >= BAD_STEP:
            if self.kind in ("step", "another batch", "rank 1"):
                logits = logits * float("inf")
            if self.kind == "dropout":
                ones = torch.nn.functional.dropout(torch.ones_like(logits))
                logits = logits * (ones / ones)
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def non_finite(kind: str, strategy: dict[str, Any]) -> dict[str, Any]:
    """Fit and return what was warned of, and what the fit left."""
    world = int(os.environ["WORLD_SIZE"])
    os.environ.pop(RUNS, None)
    module = Fails(kind)
    torch.manual_seed(0)
    trainer = quiet_trainer(world, strategy=strategy, max_steps=4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, DataLoader(TokenDataset(size=8), batch_size=1))
    said = [str(each.message) for each in caught if "is nan or infinite" in str(each.message)]
    return {"said": said, "steps": trainer.global_step, "forwards": module.num_forwards}


def fails_soon(patience_s: float, strategy: dict[str, Any]) -> dict[str, Any]:
    """Fail on rank 1 alone in the run once more, which waits so long for the other rank."""
    with mock.patch.object(failure, "_PATIENCE_S", patience_s):
        return non_finite("rank 1", strategy)


class Drifts(Plain):
    """One rank adds a little to one of its shards in a hook, where the others add nothing: as often as they write."""

    def __init__(self, rank: int | None) -> None:
        super().__init__(tiny_llama)
        self.rank = rank

    def on_train_batch_end(self, *_: Any) -> None:
        if self.rank is not None and steps_of(self.trainer) == 1:
            with torch.no_grad():
                self.model.layers[0].attention_norm.weight.to_local()[0] += 1e-9 * (self.global_rank == self.rank)


def drift(rank: int | None, strategy: dict[str, Any], *, save: bool) -> dict[str, Any]:
    """Fit, comparing each second step, or before a checkpoint alone; return what was warned of."""
    world, every = int(os.environ["WORLD_SIZE"]), replicas.EVERY_STEPS
    replicas.EVERY_STEPS = 1000 if save else 2
    try:
        trainer = quiet_trainer(world, strategy=dict(preflight=False, **strategy), max_steps=4)
        with warnings.catch_warnings(record=True) as caught, tempfile.TemporaryDirectory() as folder:
            warnings.simplefilter("always")
            trainer.fit(Drifts(rank), DataLoader(TokenDataset(size=16), batch_size=1))
            if save:
                trainer.save_checkpoint(Path(trainer.strategy.broadcast(folder)) / "last.ckpt")
    finally:
        replicas.EVERY_STEPS = every
    return {"said": [str(each.message) for each in caught if "no longer the same" in str(each.message)]}
