"""The modules that the behaviours train."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.trainer.behaviours.harness import Full, Run, weights
from tests.trainer.tiny import Plain, tiny_llama

Batch = dict[str, Tensor]


class User(Plain):
    """Trains and evaluates; remembers what each hook would show."""

    def __init__(self, lr: float = 0.02) -> None:
        super().__init__(tiny_llama, lr=lr)
        self.seen: list[Any] = []

    def loss(self, batch: Batch) -> Tensor:
        return F.cross_entropy(self.logits(batch).flatten(0, 1), batch["shift_labels"].flatten())

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(float(loss.detach()))
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True, batch_size=1)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True, batch_size=1)

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.logits(batch).argmax(-1)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Leave out what `Plain` does here."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=self.lr)


def shown(trainer: Any, module: Any, **more: Any) -> dict[str, Any]:
    """Return what a user looks at after a run."""
    return {
        "losses": module.losses,
        "steps": trainer.global_step,
        "epoch": trainer.current_epoch,
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "weights": weights(module),
        **more,
    }


def fitted(run: Run, module: Any = None, size: int = 8, validation: bool = False, **options: Any) -> dict[str, Any]:
    """Fit on tokens, and return what a user looks at."""
    user = User() if module is None else module
    trainer = run.trainer(**options)
    loaders = (run.loader(size), run.validation(6, 24)) if validation else (run.loader(size),)
    trainer.fit(user, *loaders)
    return shown(trainer, user, seen=user.seen)


def full(run: Run, size: int = 8, module: Any = None, **options: Any) -> dict[str, Any]:
    user, trainer = module or User(), run.trainer(**options)
    trainer.fit(user, run.loader(data=Full(size)))
    return shown(trainer, user, seen=user.seen)
