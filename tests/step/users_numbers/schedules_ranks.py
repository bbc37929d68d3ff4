"""What runs in the ranks: targets of which more are left out from an epoch or step on, or once a callback or a count says so; no operation is
new then."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_sp import SequenceParallelError
from tests.flows.tiny import VOCABULARY, llama, rows
from tests.trainer.tiny import Plain, TokenDataset, quiet_trainer, tiny_llama


class Skipping(Plain):
    def __init__(self, kind: str) -> None:
        super().__init__(tiny_llama)
        self.kind, self.skipped, self.steps, self.batches = kind, 0, 0, 0
        self.weights = torch.ones(4 if kind == "index" else 8)
        self.late, self.is_late = nn.Dropout(0.0).eval(), False
        self.counted = {"attribute": 0, "entry": {"n": 0}, "tensor": torch.tensor(0), "read": torch.tensor(0)}

    def count(self, batch_idx: int) -> Any:
        """Return whether this is the third batch of six, by a counter of a kind."""
        counted: Any = self.counted
        if self.kind == "attribute":
            counted["attribute"] += 1
            return counted["attribute"] % 6 == 3
        if self.kind == "entry":
            counted["entry"]["n"] += 1
            return counted["entry"]["n"] % 6 in (3, 4)
        if self.kind in ("tensor", "read"):
            counted[self.kind] += 1
            taken = (counted["read"].item() + 1) % 6 if self.kind == "read" else (counted["tensor"] + 1) % 6
            return taken == 4
        return self.kind == "batch_idx" and (batch_idx + 1) % 6 == 3

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        targets = batch["shift_labels"].clone()
        skipped = {"callback": self.skipped, "hook": self.skipped}
        if self.kind == "epoch":
            skipped["epoch"] = 4 * int(self.trainer.fit_loop.epoch_progress.current.processed)
        if self.kind == "step":
            skipped["step"] = 4 if self.global_step >= 7 else 0
        if self.kind == "every sixth":
            skipped["every sixth"] = 4 if (self.global_step + 1) % 6 == 0 else 0
        if self.kind == "last batch":
            skipped["last batch"] = 4 if self.trainer.is_last_batch else 0
        skipped["steps"] = 4 if self.steps >= 7 else 0
        skipped["batches"] = 4 if self.batches >= 7 else 0
        weight = self.weights[torch.tensor([self.steps])].mean()
        self.steps += self.kind in ("steps", "index")
        skipped["module"] = 4 if self.late.training else 0
        skipped["flag"] = skipped["own flag"] = 4 * self.is_late
        self.is_late |= self.kind == "own flag"
        skipped[self.kind] = skipped.get(self.kind, 0) or 4 * bool(self.count(batch_idx))
        targets[:, : skipped.get(self.kind, 0)] = -100
        return weight * F.cross_entropy(self.logits(batch).flatten(0, 1), targets.flatten())

    def on_train_epoch_start(self) -> None:
        self.steps = 0


class Phases(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        module.skipped = 4 if module.kind == "callback" and trainer.global_step >= 6 else 0
        module.batches += 1
        module.is_late |= module.kind == "flag"


class OneBatch(Phases):
    """A phase of one batch, which begins and ends between two that are handed over."""

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        module.skipped = 4 if trainer.global_step == 5 and module.kind == "hook" else 0
        module.late.train(trainer.fit_loop.epoch_loop.global_step == 5)


def fit(kind: str) -> dict[str, Any]:
    """Return what was refused, and after how many steps."""
    torch.manual_seed(3)
    epochs = 2 if kind in ("epoch", "index") else 1
    callbacks = [OneBatch() if kind in ("hook", "module") else Phases()]
    trainer, error = quiet_trainer(2, strategy={"ring_size": 2}, max_epochs=epochs, callbacks=callbacks), ""
    rows = TokenDataset(8 if epochs == 2 else 16)
    try:
        trainer.fit(Skipping(kind), DataLoader(rows, batch_size=2))
    except SequenceParallelError as refusal:
        error = str(refusal)
    return {"error": error, "steps": trainer.global_step}


class OfTasks(pl.LightningModule):
    """Each batch says its task; of one the tokens are turned around."""

    def __init__(self) -> None:
        super().__init__()
        self.model = llama(num_hidden_layers=1)
        self.losses: list[float] = []
        self.is_whole: list[bool] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids, targets = batch["input_ids"], batch["shift_labels"]
        if batch["task"] == "turned":
            ids, targets = ids.roll(3, 1), targets.roll(3, 1)
        return F.cross_entropy(self.model(ids).logits.view(-1, VOCABULARY), targets.flatten())

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))
        self.is_whole.append(getattr(self.trainer.strategy, "sees_whole_sequences", True))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _one_row(samples: Any) -> dict[str, Any]:
    return {name: value[None] if isinstance(value, Tensor) else value for name, value in samples[0].items()}


def of_tasks(world: int) -> tuple[list[float], list[bool]]:
    """Return the losses of four steps, of which the third is of another task, and which of them saw whole sequences."""
    samples = [{**row, "task": "turned" if number == 2 else "plain"} for number, row in enumerate(rows(4, 16))]
    torch.manual_seed(3)
    module = OfTasks()
    strategy = {"ring_size": world, "global_view": "auto"}
    quiet_trainer(world, strategy=strategy).fit(module, DataLoader(samples, collate_fn=_one_row))
    return module.losses, module.is_whole
