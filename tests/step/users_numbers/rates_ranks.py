"""What runs in the ranks: targets of which more are left out once a learning rate is low, as a schedule or a hook makes it."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

from lightning_sp import SequenceParallelError
from tests.trainer.tiny import Plain, TokenDataset, quiet_trainer, tiny_llama

FALLS = {
    "group": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / 10)),
    "last rate": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.ConstantLR(optimizer, 0.5, 100), lr_scheduler.ExponentialLR(optimizer, 0.5)],
        milestones=[4],
    ),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, min_lr=0.01),
}


class Falling(Plain):
    def __init__(self, kind: str) -> None:
        super().__init__(tiny_llama)
        self.kind = kind

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        targets = batch["shift_labels"].clone()
        if 0.02 < self.rate < 0.035 or (self.rate < 0.02 and self.kind != "hook"):
            targets[:, :4] = -100
        loss = F.cross_entropy(self.logits(batch).flatten(0, 1), targets.flatten())
        self.log("never better", 1.0)
        return loss

    @property
    def rate(self) -> float:
        if self.kind == "last rate":
            return self.lr_schedulers().get_last_lr()[0]
        return self.optimizers().param_groups[0].get("lr")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        if self.kind not in FALLS:
            return optimizer
        schedule = {"scheduler": FALLS[self.kind](optimizer), "interval": "step", "monitor": "never better"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}


class SetsRate(pl.Callback):
    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        for group in trainer.optimizers[0].param_groups:
            group["lr"] = 0.03 if trainer.global_step >= 6 else 0.1


def fit(kind: str) -> dict[str, Any]:
    """Return what was refused, and after how many steps."""
    torch.manual_seed(3)
    callbacks = [SetsRate()] if kind == "hook" else []
    trainer, error = quiet_trainer(2, strategy={"ring_size": 2}, max_epochs=1, callbacks=callbacks), ""
    try:
        trainer.fit(Falling(kind), DataLoader(TokenDataset(16), batch_size=2))
    except SequenceParallelError as refusal:
        error = str(refusal)
    return {"error": error, "steps": trainer.global_step}
