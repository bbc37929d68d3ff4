"""`Module.load_from_checkpoint` of the best checkpoint after the fit, with hyperparameters, on whole rows."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from tests.flows.tiny import Tuned, llama, rows


class Module(Tuned):
    def __init__(self, width: int) -> None:
        super().__init__(llama(intermediate_size=width))
        self.save_hyperparameters()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.model(**batch).loss, sync_dist=True)


def main(batch_size: int, **options: Any) -> Any:
    torch.manual_seed(2)
    samples = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in rows()]
    loader = DataLoader(samples, batch_size=batch_size)
    module, best = Module(40), ModelCheckpoint(monitor="val_loss")
    trainer = pl.Trainer(max_epochs=2, callbacks=[best], **options)
    trainer.fit(module, loader, loader)
    loaded = Module.load_from_checkpoint(best.best_model_path).double().eval()
    ids = torch.stack([sample["input_ids"] for sample in samples])
    with torch.no_grad():
        return module, {"loaded": float(loaded.model(input_ids=ids, labels=ids).loss), "width": loaded.hparams.width}
