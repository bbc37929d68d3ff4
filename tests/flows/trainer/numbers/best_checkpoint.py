"""ModelCheckpoint keeps the best, `trainer.test(ckpt_path='best')` loads it."""

from __future__ import annotations

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

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self.model(batch["input_ids"]).logits
        self.log("val_loss", F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten()), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        logits = self.model(batch["input_ids"]).logits
        self.log("test_loss", F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten()), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=2.0)


def main(batch_size: int, **options: Any) -> Any:
    module = Module(llama())
    best = pl.callbacks.ModelCheckpoint(monitor="val_loss", save_top_k=1, save_last=True)
    trainer = pl.Trainer(max_epochs=3, callbacks=[best], **options)
    held_out = DataLoader(rows(8, 20), batch_size=batch_size)
    trainer.fit(module, DataLoader(rows(), batch_size=batch_size), held_out)
    (tested,) = trainer.test(module, held_out, ckpt_path="best", verbose=False)
    return module, {"best": float(best.best_model_score), **tested}
