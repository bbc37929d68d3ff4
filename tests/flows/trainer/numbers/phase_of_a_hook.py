"""A callback that leaves targets out of one batch in seven, by a number that it sets at the batch's start and takes back at its end."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from tests.flows.tiny import Tuned, llama, rows


class Phases(pl.Callback):
    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        module.skipped = 4 if trainer.global_step % 7 == 6 else 0

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        module.skipped = 0


class Module(Tuned):
    skipped = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        targets = batch["shift_labels"].clone()
        targets[:, : self.skipped] = -100
        return F.cross_entropy(self.model(batch["input_ids"]).logits.flatten(0, 1), targets.flatten())


def main(batch_size: int, **options: Any) -> Any:
    module = Module(llama())
    pl.Trainer(max_epochs=1, callbacks=[Phases()], **options).fit(module, DataLoader(rows(32), batch_size=batch_size))
    return module
