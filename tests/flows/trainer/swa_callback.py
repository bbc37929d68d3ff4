"""Lightning's StochasticWeightAveraging from the second epoch on, resumed from a checkpoint in the middle of it."""

from __future__ import annotations

import copy
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.flows.tiny import VOCABULARY, llama, rows


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = llama().model
        self.head = nn.Linear(32, VOCABULARY)
        self.register_buffer("scale", torch.ones(()))

    def loss(self, batch: Any) -> Tensor:
        logits = self.head(self.model(batch["input_ids"]).last_hidden_state) * self.scale
        return F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.scale += 0.01

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def main(batch_size: int, **options: Any) -> Any:
    folder = f"{options['default_root_dir']}/swa-{options['devices']}-{batch_size}-{type(options['strategy']).__name__}"
    loader, validation = DataLoader(rows(24), batch_size=batch_size), DataLoader(rows(8), batch_size=batch_size)
    again, saves = copy.deepcopy(options["strategy"]), ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    callbacks = [StochasticWeightAveraging(0.02, swa_epoch_start=1, annealing_epochs=2), saves]
    pl.Trainer(max_epochs=5, callbacks=callbacks, **options).fit(Module(), loader, validation)
    torch.manual_seed(8)
    module, options = Module(), {**options, "strategy": again}
    trainer = pl.Trainer(
        max_epochs=5, callbacks=[StochasticWeightAveraging(0.02, swa_epoch_start=1, annealing_epochs=2)], **options
    )
    trainer.fit(module, loader, validation, ckpt_path=f"{folder}/epoch=2.ckpt")
    return module
