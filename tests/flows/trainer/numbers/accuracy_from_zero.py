"""An accuracy by hand that is 0 in the first validation, whole and on each rank's part, and another number later."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
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

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        found = self.model(batch["input_ids"]).logits.argmax(-1)
        right = (found == batch["shift_labels"]) & (self.current_epoch > 0)
        self.log("accuracy", right.double().mean(), sync_dist=True)


def main(batch_size: int, **options: Any) -> Any:
    module = Module(llama())
    loaders = DataLoader(rows(), batch_size=batch_size), DataLoader(rows(8), batch_size=batch_size)
    pl.Trainer(max_epochs=2, **options).fit(module, *loaders)
    return module
