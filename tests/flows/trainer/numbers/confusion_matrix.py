"""torchmetrics that count, read at the epoch's end: a confusion matrix of tokens, others in a plain dict; targets shifted by the step."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from tests.flows.tiny import VOCABULARY, Tuned, llama, rows


class Module(Tuned):
    def __init__(self) -> None:
        from torchmetrics import CatMetric, SumMetric
        from torchmetrics.classification import MulticlassConfusionMatrix

        super().__init__(llama())
        self.matrix = MulticlassConfusionMatrix(VOCABULARY)
        self.others = {"tokens": SumMetric(), "losses": CatMetric()}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.model(batch["input_ids"]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten())
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits, targets = self.model(batch["input_ids"]).logits[:, :-1], batch["input_ids"][:, 1:]
        self.matrix.update(logits.argmax(-1), targets)
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        self.others["tokens"].update(targets.numel())
        self.others["losses"].update(losses[targets.flatten() > 9])

    def on_validation_epoch_end(self) -> None:
        matrix = self.matrix.compute().double()
        self.log("tokens", self.others["tokens"].compute())
        self.log("in_the_matrix", matrix.sum())
        self.log("right", matrix.diagonal().sum())
        self.log("by_class", (matrix.sum(1) * torch.arange(VOCABULARY, device=self.device)).sum())
        self.log("median", self.others["losses"].compute().median())
        for each in (self.matrix, *self.others.values()):
            each.reset()


def main(batch_size: int, **options: Any) -> Any:
    module = Module()
    loaders = DataLoader(rows(), batch_size=batch_size), DataLoader(rows(8), batch_size=batch_size)
    pl.Trainer(max_epochs=2, **options).fit(module, *loaders)
    return module
