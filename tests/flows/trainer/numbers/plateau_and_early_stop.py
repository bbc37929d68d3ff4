"""ReduceLROnPlateau and EarlyStopping by the validation loss."""

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

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}


def main(batch_size: int, **options: Any) -> Any:
    module = Module(llama())
    stop = pl.callbacks.EarlyStopping("val_loss", patience=2)
    trainer = pl.Trainer(max_epochs=6, callbacks=[stop], **options)
    trainer.fit(module, DataLoader(rows(), batch_size=batch_size), DataLoader(rows(8), batch_size=batch_size))
    return module, {"epochs": trainer.current_epoch, "lr": trainer.optimizers[0].param_groups[0]["lr"]}
