"""torchmetrics' Perplexity and accuracy of tokens in validation."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from tests.flows.tiny import VOCABULARY, Tuned, llama, rows


class Module(Tuned):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.model(batch["input_ids"]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten())
        self.log("train_loss", loss)
        return loss

    def on_fit_start(self) -> None:
        from torchmetrics.classification import MulticlassAccuracy
        from torchmetrics.text import Perplexity

        self.perplexity = Perplexity(ignore_index=-100).to(self.device)
        self.accuracy = MulticlassAccuracy(VOCABULARY, average="micro", ignore_index=-100).to(self.device)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self.model(batch["input_ids"]).logits
        self.perplexity(logits, batch["shift_labels"])
        self.accuracy(logits.argmax(-1), batch["shift_labels"])
        self.log("perplexity", self.perplexity, on_epoch=True)
        self.log("accuracy", self.accuracy, on_epoch=True)


def main(batch_size: int, **options: Any) -> Any:
    module = Module(llama())
    loaders = DataLoader(rows(), batch_size=batch_size), DataLoader(rows(7), batch_size=batch_size)
    pl.Trainer(max_epochs=1, **options).fit(module, *loaders)
    return module
