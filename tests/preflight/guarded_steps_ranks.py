"""What runs in the ranks: a step that checks its tokens, measures by them, and says how far it is."""

from __future__ import annotations

import logging
from contextlib import redirect_stdout
from io import StringIO
from unittest.mock import Mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_sp.preflight.trial import Trial
from tests.instruments.told import told
from tests.trainer.tiny import VOCAB, Plain, TokenDataset, quiet_trainer, tiny_llama

log = logging.getLogger("tests.own")


class Guarded(Plain):
    def __init__(self) -> None:
        super().__init__(tiny_llama)

    def checked(self, batch: dict[str, Tensor]) -> Tensor:
        ids, targets = batch["input_ids"], batch["shift_labels"]
        assert (ids >= 0).all()
        assert (ids < VOCAB).all(), "beyond the vocabulary"
        bad = targets >= VOCAB
        if bad.any():
            raise ValueError("bad targets")
        logits = self.logits(batch)
        assert torch.isfinite(logits).all()
        return logits

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits = self.checked(batch)
        loss = F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten())
        print("step", batch_idx, "of", self.global_step)
        log.error("logged %d", batch_idx)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self.checked(batch).flatten(0, 1), batch["shift_labels"].flatten()))


def fit() -> tuple[list[str], str, int]:
    """Return what the preflight says, what the step has printed and logged, and how often it ran whole from another seed."""
    torch.manual_seed(3)
    printed, seeds, whole = StringIO(), Mock(), Trial.whole

    def counted(trial: Trial, **seed: int) -> object:
        if seed:
            seeds()
        return whole(trial, **seed)

    trainer = quiet_trainer(2, strategy={"ring_size": 2}, max_steps=2, max_epochs=-1)
    loader = DataLoader(TokenDataset(4), batch_size=2)
    log.addHandler(handler := logging.StreamHandler(printed))
    Trial.whole = counted  # type: ignore[method-assign, assignment]
    try:
        with told() as said, redirect_stdout(printed):
            trainer.fit(Guarded(), loader, loader)
    finally:
        Trial.whole = whole  # type: ignore[method-assign]
        log.removeHandler(handler)
    return [each for each in said if "preflight" in each], printed.getvalue(), seeds.call_count
