"""Validation counts in an object of its own, keeps arrays and shares in lists, and a hook at the epoch's end makes numbers of all."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from tests.flows.tiny import Tuned, llama, rows


class Counter:
    def __init__(self) -> None:
        self.right, self.all = 0, 0

    def add(self, found: Tensor, wanted: Tensor) -> None:
        self.right += int((found == wanted).sum())
        self.all += wanted.numel()


class Module(Tuned):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.model(batch["input_ids"]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten())
        self.log("train_loss", loss)
        return loss

    def on_validation_epoch_start(self) -> None:
        self.arrays: list[np.ndarray[Any, Any]] = []
        self.by_name: defaultdict[str, list[Tensor]] = defaultdict(list)
        self.shares: list[float] = []
        self.counter, self.last = Counter(), torch.zeros(())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self.model(batch["input_ids"]).logits
        found, wanted = logits.argmax(-1), batch["shift_labels"]
        self.arrays.append((found == wanted).cpu().numpy())
        self.by_name["largest"].append(logits.amax(-1).flatten())
        self.shares.append((found == wanted).double().mean().item())
        self.counter.add(found, wanted)
        self.last = logits.amax(-1)

    def on_validation_epoch_end(self) -> None:
        self.log("of_arrays", float(np.concatenate(self.arrays).mean()), sync_dist=True)
        self.log("of_names", torch.cat(self.by_name["largest"]).double().mean(), sync_dist=True)
        self.log("of_shares", sum(self.shares) / len(self.shares), sync_dist=True)
        self.log("of_object", self.counter.right / self.counter.all, sync_dist=True)
        self.log("of_last", self.last.mean(), sync_dist=True)


def main(batch_size: int, **options: Any) -> Any:
    module = Module(llama())
    loaders = DataLoader(rows(), batch_size=batch_size), DataLoader(rows(8), batch_size=batch_size)
    pl.Trainer(max_epochs=1, **options).fit(module, *loaders)
    return module
