"""Fits an example of examples/losses on one device, or as a rank of several."""

from __future__ import annotations

import importlib
import logging
import warnings
from typing import Any

import lightning.pytorch as pl
import torch

from examples.losses.tiny import loader
from lightning_sp import SequenceParallelError, SequenceParallelStrategy
from tests.trainer.tiny import _full

STEPS, ROWS_OF_BATCH = 2, 4
# The last batch has one sample: with two data-parallel groups one of them gets a filler.
SAMPLES = 5
# Module and class -> rows of a sample.
EXAMPLES = {
    "preferences.DPO": 2,
    "preferences.IPO": 2,
    "preferences.ORPO": 2,
    "reward_model.RewardModel": 2,
    "contrastive.Contrastive": 2,
    "contrastive.Similarity": 2,
    "distillation.Distillation": 1,
    "tokens.SeveralTokens": 1,
    "tokens.ZLoss": 1,
    "tokens.Weighed": 1,
}


class Logged(pl.Callback):
    """What was logged after each step."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["loss"]))


def fit(name: str, strategy: dict[str, Any] | None, world: int = 1) -> dict[str, Any]:
    """Return the weights after some steps, and the logged losses."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(3)
    file, _, kind = name.partition(".")
    module = getattr(importlib.import_module(f"examples.losses.{file}"), kind)()
    logged = Logged()
    trainer = pl.Trainer(
        accelerator="cpu", devices=world, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        precision="64-true", max_steps=STEPS, callbacks=[logged], log_every_n_steps=1,
        strategy="auto" if strategy is None else SequenceParallelStrategy(**strategy),
    )  # fmt: skip
    samples = ROWS_OF_BATCH // (strategy or {}).get("data_parallel_size", 1)
    error = ""
    try:
        trainer.fit(module, loader(rows=EXAMPLES[name], batch_size=samples, size=SAMPLES))
    except SequenceParallelError as refusal:
        error = str(refusal)
    weights = {n: _full(p.detach()).clone() for n, p in module.named_parameters()}
    return {"error": error, "losses": logged.losses, "weights": weights}


def fits(names: list[str], strategy: dict[str, Any], world: int) -> dict[str, dict[str, Any]]:
    return {name: fit(name, strategy, world) for name in names}
