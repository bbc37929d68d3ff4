"""Hooks before a step that read their batch, change it, and draw: what each rank runs in test_batch_starts.py."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_sp import SequenceParallelError
from tests.trainer.lightning_ranks import trainer_of
from tests.trainer.tiny import Plain, TokenDataset, _full, tiny_gpt


class Counts(pl.Callback):
    """Counts what it is handed, and sets the learning rate by it."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        tokens = batch["input_ids"] + 0
        self.seen += [float(tokens.numel()), float((tokens > 20).sum())]
        trainer.optimizers[0].param_groups[0]["lr"] = 0.01 * float((tokens > 20).sum()) / tokens.numel()

    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.seen.append(float((batch["input_ids"] > 20).sum()))


class Starts(Plain):
    """From its third batch on a hook changes the batch by positions; every hook exchanges rows, by numbers that it draws."""

    def __init__(self, draws: bool) -> None:
        super().__init__(tiny_gpt)
        self.draws = draws

    def _mixed(self, batch: Any) -> Any:
        """Return the batch with its rows in another order: a mean over them is the same in any, if it is one order for all tokens."""
        if not self.draws:
            return batch
        order = torch.randperm(len(batch["input_ids"]))
        return {**batch, "input_ids": batch["input_ids"][order], "shift_labels": batch["shift_labels"][order]}

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return self._mixed(batch)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return self._mixed(batch) if getattr(self.trainer.strategy, "sees_whole_sequences", True) else batch

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        batch.update(self._mixed(batch))
        shape = batch["input_ids"].shape
        batch["weights"] = torch.linspace(0.5, 1, shape[1], dtype=torch.float64).expand(shape).clone()
        if batch_idx > 1:
            batch["shift_labels"][:, :5] = -100
            batch["input_ids"] = batch["input_ids"].roll(1, 1)

    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        batch["shift_labels"][:, -3:] = 7

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.logits(batch) * batch["weights"][..., None]
        loss = F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten())
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self.logits(batch).flatten(0, 1), batch["shift_labels"].flatten()))


class Apart(Plain):
    """A hook that makes another batch of each rank's own."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        batch["shift_labels"][:, 0] = self.trainer.global_rank


def fit(strategy: dict[str, Any] | None, world: int, length: int, draws: bool = False) -> dict[str, Any]:
    """Fit under plain Lightning (None) or ours; what hooks saw, and what came of it."""
    return _fit(Starts(draws), strategy, world, length)


def fit_apart(strategy: dict[str, Any]) -> dict[str, Any]:
    """As `fit`, of ranks that change their batch in other ways."""
    return _fit(Apart(tiny_gpt), strategy, 2, 32)


def _fit(module: Plain, strategy: dict[str, Any] | None, world: int, length: int) -> dict[str, Any]:
    torch.manual_seed(3)
    counts, data = Counts(), TokenDataset(16, length)
    rows = [
        {"input_ids": data.tokens[i, :-1], "position_ids": torch.arange(length), "shift_labels": data.tokens[i, 1:]}
        for i in range(16)
    ]
    trainer = trainer_of(strategy, world, callbacks=[counts], max_epochs=1)
    try:
        trainer.fit(module, DataLoader(rows, batch_size=4), DataLoader(rows[:6], batch_size=4))  # type: ignore[arg-type]
    except SequenceParallelError as error:
        return {"error": str(error)}
    weights = {n: _full(p.detach()).clone() for n, p in module.named_parameters()}
    left = [name for owner in (module, counts) for name in vars(owner) if name.startswith("on_")]
    logged = float(trainer.callback_metrics.get("val_loss", torch.zeros(())))
    return {
        "error": "",
        "seen": counts.seen,
        "losses": module.losses,
        "weights": weights,
        "left": left,
        "logged": logged,
    }
