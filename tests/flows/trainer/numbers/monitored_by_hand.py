"""Early stopping by an accuracy that validation computes by hand, of the tokens that it is given."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor
from torch.utils.data import DataLoader

from tests.flows.tiny import Tuned, llama, rows

# Of data-parallel groups each logs its own number, as under DDP.
LAYOUTS = ["ulysses 2", "ring 2"]


class Module(Tuned):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.model(batch["input_ids"]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten())
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self.model(batch["input_ids"]).logits
        wrong = F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten(), reduction="none")
        self.log("hard", (wrong > 3.7).double().mean())


def main(batch_size: int, **options: Any) -> Any:
    module = Module(llama())
    loaders = DataLoader(rows(), batch_size=batch_size), DataLoader(rows(8), batch_size=batch_size)
    pl.Trainer(max_epochs=1, val_check_interval=1, callbacks=[EarlyStopping("hard")], **options).fit(module, *loaders)
    return module
