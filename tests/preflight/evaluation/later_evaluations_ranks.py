"""What each rank runs in test_later_evaluations.py: validations that from some time on read other tokens, log one more number, or show another
one than 0, or than its rounding."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.flows.tiny import Tuned, llama, rows
from tests.trainer.tiny import quiet_trainer


class Later(Tuned):
    """Its second validation does what the first does not: its cross entropy is one number on all ranks, right or wrong."""

    def __init__(self, kind: str) -> None:
        super().__init__(llama(num_hidden_layers=1))
        self.kind = kind
        self.norm = nn.LayerNorm(32) if "mean" in kind else None
        self.found: list[dict[str, float]] = []
        self.means = list[float]()

    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.model(ids).logits.flatten(0, 1), targets.flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch["input_ids"], batch["shift_labels"])
        return loss if self.norm is None else loss + (self.normed(batch["input_ids"]) - 1.0).square().mean()

    def normed(self, ids: Tensor) -> Tensor:
        assert self.norm is not None
        found: Tensor = self.norm(self.model.get_input_embeddings()(ids))
        return found

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        ids, targets, begun = batch["input_ids"], batch["shift_labels"], self.current_epoch == 1
        if (self.kind == "other tokens" and begun) or "of_rows" in batch:
            ids, targets = ids.roll(3, 1), targets.roll(3, 1)
        self.log("loss", self.loss(ids, targets))
        if self.kind == "another number" and begun:
            self.log("largest", self.model(ids).logits.amax((1, 2)).mean())
        if self.kind == "counts":
            self.log("counts", (self.model(ids).logits.amax(-1) * batch["scale"][:, None]).int().double().mean())
        if self.kind == "a mean":
            self.log("mean", self.normed(ids).mean())
        if self.kind == "a kept mean":
            self.means.append(float(self.normed(ids).mean()))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        weights = 1 + (batch["scale"][:, None, None] - 0.01) * torch.arange(32)
        return (self.normed(batch["input_ids"]) * weights).mean((1, 2))

    def on_validation_end(self) -> None:
        shown = {name: float(value) for name, value in self.trainer.callback_metrics.items()}
        self.found.append(shown | {f"mean {place}": each for place, each in enumerate(self.means)})
        self.means.clear()


def fit(world: int, kind: str) -> list[dict[str, float]]:
    """Return the numbers of two validations, and of one before where a first one is to be of an untrained model; or predictions of that."""
    torch.manual_seed(3)
    samples = rows(4, 16)
    for each in samples[2:] if kind == "another entry" else ():
        each["of_rows"] = torch.ones(())
    for number, each in enumerate(samples if kind in ("counts", "a predicted mean") else ()):
        each["scale"] = torch.tensor(0.01 if number < 2 else 100.0, dtype=torch.float64)
    module, loader = Later(kind), DataLoader(samples, batch_size=2)  # type: ignore[arg-type]
    monitor = pl.callbacks.EarlyStopping("loss", patience=5)
    trainer = quiet_trainer(
        world, strategy={"ring_size": world, "global_view": "auto"}, max_epochs=2, callbacks=[monitor],
        num_sanity_val_steps=-1 if "mean" in kind else 0,
    )  # fmt: skip
    if kind == "a predicted mean":
        return [{"first": float(each[0]), "second": float(each[1])} for each in trainer.predict(module, loader) or ()]
    trainer.fit(module, loader, loader)
    return module.found
