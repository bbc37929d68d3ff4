"""Validation keeps predictions and targets of tokens in lists, and a hook at the epoch's end makes numbers of all."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from tests.flows.tiny import Tuned, llama, rows


class Module(Tuned):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.model(batch["input_ids"]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten())
        self.log("train_loss", loss)
        return loss

    def on_validation_epoch_start(self) -> None:
        self.pairs: list[tuple[Tensor, Tensor]] = []
        self.by_name: defaultdict[str, list[Tensor]] = defaultdict(list)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self.model(batch["input_ids"]).logits
        self.pairs.append((logits.argmax(-1), batch["shift_labels"]))
        self.by_name["largest"].append(logits.amax(-1))

    def on_validation_epoch_end(self) -> None:
        found, wanted = (torch.cat(each) for each in zip(*self.pairs, strict=True))
        self.log("accuracy", (found == wanted).double().mean(), sync_dist=True)
        self.log("largest", torch.cat(self.by_name["largest"]).mean(), sync_dist=True)


def main(batch_size: int, **options: Any) -> Any:
    module = Module(llama())
    loaders = DataLoader(rows(), batch_size=batch_size), DataLoader(rows(8), batch_size=batch_size)
    pl.Trainer(max_epochs=1, **options).fit(module, *loaders)
    return module
