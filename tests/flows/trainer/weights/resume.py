"""Training goes on from a checkpoint in another Trainer: `fit(ckpt_path=...)`."""

from __future__ import annotations

import copy
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

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main(batch_size: int, **options: Any) -> pl.LightningModule:
    path = (
        f"{options['default_root_dir']}/two-{options['devices']}-{batch_size}-{type(options['strategy']).__name__}.ckpt"
    )
    loader, again = DataLoader(rows(24), batch_size=batch_size), copy.deepcopy(options["strategy"])
    first = pl.Trainer(max_epochs=1, **options)
    first.fit(Module(llama()), loader)
    first.save_checkpoint(path)
    torch.manual_seed(8)
    module = Module(llama())
    pl.Trainer(max_epochs=2, **{**options, "strategy": again}).fit(module, loader, ckpt_path=path)
    return module
