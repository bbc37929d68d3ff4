"""What runs in the ranks: targets of which more are left out once a number is low: a loss, as a step keeps it, a metric, or a weight."""

from __future__ import annotations

import logging
import os
from contextlib import redirect_stdout
from io import StringIO
from typing import Any
from unittest.mock import Mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_sp import SequenceParallelError
from tests.trainer.tiny import Plain, TokenDataset, quiet_trainer, tiny_llama


class Deciding(Plain):
    def __init__(self, kind: str) -> None:
        super().__init__(tiny_llama)
        self.kind, self.tensor, self.mean, self.losses = kind, torch.tensor(9.0), 1.0, list[float]()
        self.norm, self.computed, self.tensors = 9.0, MeanMetric(), list[Tensor]()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        targets = batch["shift_labels"].clone()
        reads = self.kind == "tokens" and len(self.losses) > 1
        if self.last < 2 or (reads and (batch["input_ids"] > 0).sum() > 1000):
            targets[:, :4] = -100
        loss = F.cross_entropy(self.logits(batch).flatten(0, 1), targets.flatten())
        self.log("train_loss", loss)
        self.computed.update(loss.detach())
        if self.kind == "own" and loss < 2:
            targets[:, :4] = -100
            return F.cross_entropy(self.logits(batch).flatten(0, 1), targets.flatten())
        if self.kind == "tensors":
            self.tensors.append(loss.detach())
        if self.kind == "attribute":
            self.known = float(loss)
        if self.kind == "tensor":
            self.tensor = loss.detach()
        if self.kind in ("list", "tokens"):
            self.losses.append(float(loss))
        if self.kind in ("tokens", "weight", "text", "hook", "computed", "tensors"):
            return loss
        self.mean = 0.9 * self.mean + 0.1 * float(loss)
        return loss / self.mean

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norm = float(self.model.norm.weight.grad.norm())

    @property
    def last(self) -> Any:
        if self.kind == "metric":
            return float(self.trainer.callback_metrics.get("train_loss", 9))
        if self.kind == "tensor":
            return self.tensor
        if self.kind == "computed":
            return self.computed.compute() if self.global_step else 9
        if self.kind == "tensors":
            return torch.stack(self.tensors[-3:]).mean() if len(self.tensors) > 2 else 9
        if self.kind == "hook":
            return 1e4 * self.norm
        if self.kind == "weight":
            return float(self.model.norm.weight.norm())
        if self.kind == "text":
            return float(f"{self.model.norm.weight.norm().item():.3f}")
        if self.kind == "list":
            return self.losses[-1] if len(self.losses) > 1 else 9
        return vars(self).get("known", 9)


def fit(kind: str) -> dict[str, Any]:
    """Return what was refused, after how many steps, and what the module keeps of its trials."""
    torch.manual_seed(3)
    trainer, error = quiet_trainer(2, strategy={"ring_size": 2}, max_steps=4, max_epochs=-1), ""
    module = Deciding(kind)
    try:
        trainer.fit(module, DataLoader(TokenDataset(8), batch_size=2))
    except SequenceParallelError as refusal:
        error = str(refusal)
    kept = (float(module.tensor), module.mean, "known" in vars(module))
    return {"error": error, "steps": trainer.global_step, "kept": kept, "type": type(module.mean) is float}


class Guarded(Plain):
    """Keeps what made its loss too large, and ends; it never is."""

    def __init__(self, folder: str) -> None:
        super().__init__(tiny_llama)
        self.folder = folder

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.logits(batch).flatten(0, 1), batch["shift_labels"].flatten())
        print("step", batch_idx)
        if loss.item() > 50:
            print("diverged")
            logging.getLogger("tests.own").error("diverged")
            torch.save(batch, f"{self.folder}/batch.pt")
            self.trainer.save_checkpoint(f"{self.folder}/diverged.ckpt")
            raise SystemExit(3)
        return loss


def guarded(folder: str) -> tuple[int, list[str], str]:
    """Return after how many steps a fit has ended, which files it wrote, and what it printed and logged."""
    torch.manual_seed(3)
    trainer = quiet_trainer(2, strategy={"ring_size": 2}, max_steps=2, max_epochs=-1)
    said, logger = StringIO(), logging.getLogger("tests.own")
    logger.addHandler(handler := logging.StreamHandler(said))
    with redirect_stdout(said):
        trainer.fit(Guarded(folder), DataLoader(TokenDataset(4), batch_size=2))
    logger.error("behind")
    logger.removeHandler(handler)
    return trainer.global_step, os.listdir(folder), said.getvalue()


# Counts in trials, too: what holds numbers of the file's own is put back behind them.
_forward = Mock()


class Searching(Plain):
    """Makes its loss smaller until it is small enough, which it is at once; or reads a weight as often as deep models do."""

    def __init__(self, kind: str) -> None:
        super().__init__(tiny_llama)
        self.kind = kind

    def logits(self, batch: dict[str, Tensor]) -> Tensor:
        _forward()
        return super().logits(batch)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        def scaled(scale: float) -> Tensor:
            return scale * F.cross_entropy(self.logits(batch).flatten(0, 1), batch["shift_labels"].flatten())

        loss, scale = scaled(1.0), 1.0
        first = value = loss.item()
        while self.kind == "rounds" and value / first > 5:
            scale *= 0.5
            loss = scaled(scale)
            value = loss.item()
        for _ in range(40 if self.kind == "weight" else 0):
            largest = self.model.norm.weight.detach().max().item()
            if largest > 4:
                loss = loss * 1.001
        return loss


def search(kind: str) -> tuple[int, int]:
    """Return after how many steps a fit has ended, and how many forwards it and its trials have run."""
    torch.manual_seed(3)
    _forward.reset_mock()
    trainer = quiet_trainer(2, strategy={"ring_size": 2}, max_steps=2, max_epochs=-1)
    trainer.fit(Searching(kind), DataLoader(TokenDataset(4), batch_size=2))
    return trainer.global_step, _forward.call_count
