"""What runs in the ranks: steps that change the run once it is late, data that grow longer through the Trainer, and a step that reads its
batch's index; beside plain Lightning on one device."""

from __future__ import annotations

from itertools import count
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from tests.trainer.tiny import Plain, TokenDataset, quiet_trainer, steps_of, tiny_llama

SEEN = {"batches": 0}
IDS = count(1)


class Changing(Plain):
    def __init__(self, kind: str) -> None:
        super().__init__(tiny_llama)
        self.kind, self.state, self.done = kind, {"seen": 0}, False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        late = self.global_step >= 4
        if self.kind == "frozen" and late:
            self.model.requires_grad_(False)
            self.model.norm.requires_grad_(True)
        if self.kind == "stopped" and late:
            self.trainer.should_stop = True
        if self.kind == "rate" and late and not self.done:
            self.done = True
            for group in self.optimizers().param_groups:
                group["lr"] *= 0.1
        SEEN["batches"] += 1
        targets, self.state["seen"] = batch["shift_labels"].clone(), self.state["seen"] + 1
        number = next(IDS) if self.kind == "iterator" else 0
        seen = {"iterator": number, "index": batch_idx + 1, "entry": self.state["seen"], "file": SEEN["batches"]}
        if seen.get(self.kind, 0) >= 5:
            targets[:, :4] = -100
        return F.cross_entropy(self.logits(batch).flatten(0, 1), targets.flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Growing(TokenDataset):
    length = 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: value[: self.length] for name, value in super().__getitem__(index).items()}


class Collate:
    length = 32

    def __call__(self, rows: list[Any]) -> Any:
        return {name: torch.stack([row[name] for row in rows])[:, : self.length] for name in rows[0]}


class Growth(pl.Callback):
    def on_train_epoch_start(self, trainer: pl.Trainer, _: Any) -> None:
        loader: Any = trainer.train_dataloader
        loader.dataset.length = 8 * (trainer.current_epoch + 1)
        assert (loader.dataset.length, len(loader.dataset[0]["input_ids"])) == (8 * (trainer.current_epoch + 1),) * 2
        loader.collate_fn.length = 20 if trainer.current_epoch > 2 else 32


def fit(kind: str, split: bool) -> dict[str, Any]:
    """Return the steps of a fit, and what it leaves."""
    torch.manual_seed(3)
    global IDS
    SEEN["batches"], IDS = 0, count(1)
    options: dict[str, Any] = {
        "max_epochs": 4 if kind == "grown" else 1,
        "callbacks": [Growth()] if kind == "grown" else [],
    }
    strategy = {"ring_size": 2, "global_view": "auto"} if split else {}
    trainer = quiet_trainer(2 if split else 1, strategy=strategy, **options)
    module = Changing(kind)
    rows = Growing(4) if kind == "grown" else TokenDataset(16)
    trainer.fit(module, DataLoader(rows, batch_size=2, collate_fn=Collate()))
    weights = {name: whole(each.detach()) for name, each in module.named_parameters()}
    return {"steps": steps_of(trainer), "weights": weights}


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
