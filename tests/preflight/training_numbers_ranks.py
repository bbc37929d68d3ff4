"""What each rank runs in test_training_numbers.py; returns plain values."""

from __future__ import annotations

import time
import warnings
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_sp import SequenceParallelError
from tests.preflight.evaluation.evaluation_ranks import Shown
from tests.trainer.tiny import VOCAB, TokenDataset, quiet_trainer


class Trained(Shown):
    """Shows in training what it would show in validation, and leaves something in attributes."""

    def __init__(self, *kinds: str) -> None:
        super().__init__(*kinds)
        self.num_steps, self.started_s, self.average = 0, 0.0, torch.zeros(())
        self.last_logits: torch.Tensor | None = None
        self.num_tokens, self.memory = 0, torch.zeros(2, VOCAB)
        self.normed: torch.Tensor | None = None

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> Any:
        loss = self.validation_step(batch, batch_idx)
        with torch.no_grad():
            logits = self.logits(batch)
            if "right" in self.kinds:
                self.num_steps += 1
                self.started_s = time.perf_counter()
                self.average = 0.9 * self.average + 0.1 * loss
                self.last_logits = logits
            if "kept" in self.kinds:
                self.num_tokens += batch["input_ids"].numel()
                self.memory[: len(logits)] = logits.mean(1).to(self.memory)
            if "zero" in self.kinds:
                normed = torch.nn.functional.layer_norm(logits, logits.shape[-1:])
                self.log("zero", normed.mean(), sync_dist=True, on_epoch=True)
            if "normed" in self.kinds:  # any tokens' have this norm
                self.normed = torch.nn.functional.normalize(logits[:, -4:], dim=-1)
        return loss


def trained(
    world: int, kinds: tuple[str, ...], strategy: dict[str, Any], monitored: str = "", length: int = 32
) -> dict[str, Any]:
    """Fit two steps; return what was logged, what was said and how many steps ran.

    Args:
        world: number of ranks.
        kinds: of numbers.
        strategy: its options.
        monitored: a number that a checkpoint is chosen by.
        length: of the sequences.
    """
    torch.manual_seed(0)
    module = Trained(*kinds)
    micro = 2 // strategy.get("data_parallel_size", 1)
    best = [ModelCheckpoint(dirpath="unwritten", monitor=monitored, save_top_k=0)] if monitored else []
    trainer = quiet_trainer(world, strategy=strategy, max_steps=2, callbacks=best, enable_checkpointing=bool(best))
    error = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.fit(module, DataLoader(TokenDataset(8, length), batch_size=micro))
        except SequenceParallelError as refusal:
            error = str(refusal)
    said = [str(each.message) for each in caught if str(each.message).startswith("preflight:")]
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {"logged": logged, "said": said, "error": error, "num_steps": len(module.evaluator.losses)}
