"""This project, through the Trainer, on the unmodified model; the variant is the strategy's options, as JSON.

Without the preflight, whose trial after 3 steps would fall within a measured one; what is given a budget has it, for its prediction is measured
there. Stages of heads are as many as the ranks have heads.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.longest.llama import adamw, llama
from benchmarks.longest.rank import Meter
from lightning_sp import SequenceParallelStrategy


class _Module(pl.LightningModule):
    def __init__(self, problem: dict[str, Any], begin_part: Callable[[str], None]) -> None:
        super().__init__()
        self.problem, self.begin_part = problem, begin_part

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            self.model = llama(self.problem, self.begin_part)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adamw(self.model)


class _Measured(pl.Callback):
    def __init__(self, meter: Meter, lengths: list[int]) -> None:
        self.meter, self.lengths = meter, lengths

    def on_train_batch_start(self, *args: Any) -> None:
        self.meter.begin()

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, *args: Any) -> None:
        # Of a rank, by the budget.
        longest: Any = trainer.strategy._checkpointing.longest  # type: ignore[attr-defined]
        self.meter.end(self.lengths[args[-1]], float(outputs["loss"]), longest=longest)


def train(variant: str, problem: dict[str, Any], world: int, batches: list[Tensor], meter: Meter) -> None:
    """Fit one epoch of the batches."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    # The model shifts the labels itself, as users of Hugging Face have it: the last token has no target.
    rows = [{"input_ids": batch[0, :-1], "labels": batch[0, :-1]} for batch in batches]
    given = json.loads(variant or "{}")
    options = {"preflight": "memory_budget_gib" in given, **given}
    if "ulysses_stages" in options:
        ulysses_size = options.get("ulysses_size", world // options.get("ring_size", 1))
        options["ulysses_stages"] = min(options["ulysses_stages"], 8 // ulysses_size)
    trainer = pl.Trainer(
        strategy=SequenceParallelStrategy(**options), accelerator="cpu", devices=world, max_epochs=1, logger=False,
        callbacks=[_Measured(meter, [batch.shape[1] - 1 for batch in batches])], enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(_Module(problem, meter.begin_part), DataLoader(rows, batch_size=1))  # type: ignore[arg-type]
