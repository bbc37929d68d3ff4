"""What runs in the ranks: steps that begin to look along the sequence between two trials."""

from __future__ import annotations

import warnings
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_sp import SequenceParallelError
from lightning_sp.preflight import agreement
from tests.trainer.tiny import Plain, TokenDataset, quiet_trainer, steps_of, tiny_llama

# Behind the trial of step 3, before that of step 10.
BEGINS = 4


class Late(Plain):
    def __init__(self, kind: str) -> None:
        super().__init__(tiny_llama)
        self.kind, self.last = kind, 2.0

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits = self.logits(batch)
        if self.kind == "whole lines" and steps_of(self.trainer) >= 3 and logits.shape[1] != 32:
            raise ValueError("made for 32 tokens")
        if (steps_of(self.trainer) >= BEGINS and self.kind in ("sums", "sparse")) or (
            self.kind == "long" and batch["lengths"][0] > 16
        ):
            logits = logits + 0.1 * logits.cumsum(1)
            if self.kind == "sparse":  # for which the global view has no rule
                logits = logits + logits.detach().to_sparse().to_dense()
        if self.is_due(batch_idx):
            logits = logits + 0.1 * logits.cumsum(1)
        if steps_of(self.trainer) >= BEGINS and self.kind == "numbers":
            logits = logits.sin() + logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten())
        self.last = float(steps_of(self.trainer) != BEGINS - 1) + 1 + float(loss.detach()) / 1_000  # another each time
        return loss

    def is_due(self, batch_idx: int) -> bool:
        """Return whether one step alone looks along the sequence: by progress that a trial of the next step would not have."""
        step = int(str(self.trainer.fit_loop.epoch_loop.global_step))
        due = {
            "sixth": batch_idx == BEGINS + 1,
            "read": self.global_step == BEGINS + 1,
            "last loss": 1 < self.last < 1.5,  # of which no trial shows the middle
            "drawn": step == BEGINS and self.trainer.strategy._steps.context.trial_seed is None,
        }
        return due.get(self.kind, False)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        logits = self.logits(batch)
        own = logits.detach().amax()
        self.log("highest", own if self.current_epoch else own * 0)


class Cut(Late):
    """Has its batches cut shorter by a hook, from the step on before which it is tried again."""

    def on_train_batch_start(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        if self.global_step >= 3:
            batch |= {name: value[:, :21] for name, value in batch.items() if value.dim() > 1}


def rows(kind: str) -> list[dict[str, Tensor]]:
    """Return rows for 8 steps; of "long" ones those of step 4 alone say so."""
    made = list(TokenDataset(16))
    # Two rows of a batch have other lengths: one that all rows share would be told before the step.
    lengths = [(32 if kind != "long" or index // 2 == BEGINS else 16) - index % 2 for index in range(16)]
    return [{**row, "lengths": torch.tensor(length)} for row, length in zip(made, lengths, strict=True)]


def fit(kind: str, steps: int, global_view: bool | str = False) -> dict[str, Any]:
    """Return what was refused, the warnings, and how often the cause of a difference was looked for."""
    torch.manual_seed(3)
    trainer = quiet_trainer(2, strategy={"ring_size": 2, "global_view": global_view}, max_steps=steps)
    error = ""
    counted = mock.patch.object(agreement, "find_causes", side_effect=agreement.find_causes)
    with counted as find_causes, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.fit((Cut if kind == "cut" else Late)(kind), DataLoader(rows(kind), batch_size=2))
        except SequenceParallelError as refusal:
            error = str(refusal)
    said = [str(each.message) for each in caught if "training_step" in str(each.message)]
    return {
        "error": error,
        "said": said,
        "whole": trainer.strategy.sees_whole_sequences,
        "searches": find_causes.call_count,
    }


def validations() -> list[str]:
    """Return what is said of a number that is a rank's own from the second validation on."""
    torch.manual_seed(3)
    trainer = quiet_trainer(2, strategy={"ring_size": 2}, max_epochs=3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Late("none"), DataLoader(TokenDataset(2), batch_size=2), DataLoader(TokenDataset(2), batch_size=2))
    return [str(each.message) for each in caught if "after a validation" in str(each.message)]
