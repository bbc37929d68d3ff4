"""Behaviours of Lightning, each written once as a user would: what a run under this strategy gives beside plain Lightning on one process.

A behaviour is a function of a `Run`, which makes its Trainers and loaders; it returns plain values. `compare` says where two answers differ.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_sp import SequenceParallelError, SequenceParallelStrategy
from tests.trainer.tiny import TokenDataset, _full

TOLERANCE = 1e-10


class Full(TokenDataset):
    """Every target counts: batches weigh alike, however the samples are cut."""

    def __getitem__(self, index: int) -> Any:
        row = super().__getitem__(1)
        return {**row, "input_ids": self.tokens[index][:-1], "shift_labels": self.tokens[index][1:]}


@dataclass(frozen=True)
class Run:
    """One run of a behaviour.

    Args:
        strategy: options of ours; None for plain Lightning on one process.
        world: ranks.
        folder: of this run alone, the same on all ranks.
    """

    strategy: dict[str, Any] | None
    world: int
    folder: Path

    @property
    def groups(self) -> int:
        """Data-parallel groups, over which a batch of the one process is split."""
        return int((self.strategy or {}).get("data_parallel_size", 1))

    @property
    def is_ours(self) -> bool:
        """Whether this is not plain Lightning."""
        return self.strategy is not None

    def trainer(self, **options: Any) -> pl.Trainer:
        """Return a Trainer without output."""
        defaults: dict[str, Any] = dict(
            accelerator="cpu", devices=self.world, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, num_sanity_val_steps=0, max_epochs=1, precision="64-true", default_root_dir=str(self.folder),
        )  # fmt: skip
        chosen: Any = "auto" if self.strategy is None else SequenceParallelStrategy(**self.strategy)
        return pl.Trainer(strategy=chosen, **{**defaults, **options})

    def loader(
        self, size: int = 8, length: int = 32, micro: int = 2, data: Dataset | None = None, **options: Any
    ) -> DataLoader:
        """Return a loader whose batches, over all groups, are those of one process."""
        return DataLoader(
            TokenDataset(size, length) if data is None else data, batch_size=micro // self.groups, **options
        )

    def validation(self, size: int, length: int) -> DataLoader:
        """Return a loader whose mean over batches does not depend on their sizes: data-parallel groups have other ones."""
        return self.loader(data=Full(size, length))


Behaviour = Callable[[Run], Mapping[str, Any]]
BEHAVIOURS: dict[str, Behaviour] = {}


def behaviour(function: Behaviour) -> Behaviour:
    """Register a function by its name."""
    BEHAVIOURS[function.__name__] = function
    return function


def weights(module: torch.nn.Module) -> dict[str, Tensor]:
    """Return a module's whole weights. Every rank must call it."""
    return {name: _full(p.detach()).clone() for name, p in module.named_parameters()}


def answer(function: Behaviour, run: Run) -> Mapping[str, Any]:
    """Run a behaviour; return what it gives, or how it ended."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    run.folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(3)
    try:
        return function(run)
    except SequenceParallelError as refusal:
        return {"refused": str(refusal)}
    except Exception as error:
        if dist.is_initialized() and run.world > 1 and "Timeout" in str(error):
            raise
        return {"raised": f"{type(error).__name__}: {error}"}


def differences(actual: Any, expected: Any, path: str = "") -> list[str]:
    """Return where two answers differ, in words."""
    if isinstance(expected, Mapping) and isinstance(actual, Mapping):
        if set(actual) != set(expected):
            return [
                f"{path}: has {sorted(map(str, set(actual) ^ set(expected)))[:6]} on one side alone: {str(actual)[:300]}"
            ]
        return [each for key in expected for each in differences(actual[key], expected[key], f"{path}.{key}")]
    if isinstance(expected, (list, tuple)) and isinstance(actual, (list, tuple)):
        if len(actual) != len(expected):
            return [f"{path}: {len(actual)} entries {str(actual)[:200]} against {len(expected)} {str(expected)[:200]}"]
        pairs = enumerate(zip(actual, expected, strict=True))
        return [each for i, (a, b) in pairs for each in differences(a, b, f"{path}[{i}]")]
    if isinstance(expected, Tensor) and isinstance(actual, Tensor):
        if actual.shape != expected.shape:
            return [f"{path}: shapes {tuple(actual.shape)} against {tuple(expected.shape)}"]
        apart = float((actual.double() - expected.double()).abs().max()) if actual.numel() else 0.0
        scale = max(1.0, float(expected.double().abs().max())) if actual.numel() else 1.0
        return [] if apart <= TOLERANCE * scale else [f"{path}: tensors {apart:.3g} apart"]
    if isinstance(expected, float) or isinstance(actual, float):
        same = (
            math.isclose(actual, expected, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
            or actual != actual != expected != expected
        )
        return [] if same else [f"{path}: {actual!r} against {expected!r}"]
    return [] if actual == expected else [f"{path}: {str(actual)[:300]!r} against {str(expected)[:300]!r}"]
