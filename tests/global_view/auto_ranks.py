"""Runs with the default view: a step that a rank's part alone refuses is tried in the global view."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_sp import SequenceParallelError, SequenceParallelStrategy
from tests.global_view.models.modules import LOSSES, Module, V, rows
from tests.instruments.record import Record
from tests.instruments.told import told

LENGTH = 29


class Insisting(nn.Module):
    """A layer within a block that takes sequences of one length alone."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] != LENGTH:
            raise ValueError(f"{LENGTH} tokens, not {x.shape[1]}")
        return self.inner(x)


class Watched(Module):
    """Trains with a loss, validates with what it makes of whole sequences, and predicts it.

    Args:
        loss: of the step.
        kinds: "insisting" has a block that fails on a part, "tuple" takes its batches as tuples, "turns" has hooks that
            change them, one by a counter, "packed" holds two documents in each row, "validation" validates and predicts, too.
    """

    def __init__(self, loss: str, kinds: tuple[str, ...] = ()) -> None:
        super().__init__(loss if loss in LOSSES else "mean_pooled")
        self.kinds, self.shapes, self.shown = kinds, [], []
        self.num_moved = 0
        if loss not in LOSSES:
            self._loss = strided
        if "insisting" in kinds:
            self.model.h[1].ln_2 = Insisting(self.model.h[1].ln_2)

    def _named(self, batch: Any) -> Any:
        return (
            dict(zip(("input_ids", "attention_mask", "classes"), batch, strict=True))
            if "tuple" in self.kinds
            else batch
        )

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if "turns" not in self.kinds:
            return batch
        self.num_moved += 1
        return {**batch, "input_ids": (batch["input_ids"] + self.num_moved) % V}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batch = self._named(batch)
        self.shapes.append(tuple(batch["input_ids"].shape))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("last", self.predict_step(batch, batch_idx)[:, -1].square().mean(), batch_size=4)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model.hidden(self._named(batch)["input_ids"])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.shown.append(tuple(self._named(batch)["input_ids"].shape))


class Late(pl.LightningModule):
    """Trains as on a rank's part, and pools in its validation, after the first half of an optimizer step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.qkv, self.head = nn.Embedding(V, 16), nn.Linear(16, 48), nn.Linear(16, V)
        self.losses = Record()
        self.shapes: set[tuple[int, ...]] = set()

    def hidden(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        return x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(
            self.head(self.hidden(batch["input_ids"])).flatten(0, 1), batch["shift_labels"].flatten()
        )
        self.log("tokens", float((batch["shift_labels"] >= 0).sum()), reduce_fx="sum", sync_dist=True)
        self.losses.append(float(loss))
        self.shapes = {tuple(batch["input_ids"].shape)}
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pooled = self.hidden(batch["input_ids"]).mean(1)[:, :3]
        self.log("pooled", F.cross_entropy(pooled, batch["classes"]), batch_size=4)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Turns(pl.Callback):
    """Changes each batch that a step is given."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        batch["input_ids"] = (batch["input_ids"] + 1) % V


def loader(kinds: tuple[str, ...]) -> Any:
    made: Any = rows(LENGTH)
    if "packed" in kinds:
        documents = torch.cat([torch.arange(11), torch.arange(LENGTH - 11)])
        made = [{**row, "position_ids": documents, "attention_mask": torch.ones_like(documents)} for row in made]
    return DataLoader([tuple(row.values()) for row in made] if "tuple" in kinds else made, batch_size=4)


def run(loss: str, kinds: tuple[str, ...], world: int, options: dict[str, Any]) -> dict[str, Any]:
    """Fit with a sanity check, validate and predict; return all that was seen, by one device without options of a strategy."""
    module = Watched(loss, kinds)
    strategy: Any = SequenceParallelStrategy(**options) if options else "auto"
    trainer = pl.Trainer(
        accelerator="cpu", devices=world, strategy=strategy, max_steps=2, precision="64-true", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[Turns()] if "turns" in kinds else [],
        num_sanity_val_steps=1 if "validation" in kinds else 0,
    )  # fmt: skip
    error, predictions, logged = "", [], {}
    with told() as lines:
        try:
            trainer.fit(module, loader(kinds), loader(kinds) if "validation" in kinds else None)
            logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
            predictions = trainer.predict(module, loader(kinds)) if "validation" in kinds else []
        except SequenceParallelError as refusal:
            error = str(refusal)
    weights = {}
    for name, parameter in module.named_parameters():
        whole: Any = parameter.detach()
        weights[name] = (whole.full_tensor() if hasattr(whole, "full_tensor") else whole).clone()
    return {
        "weights": weights,
        "losses": module.losses[-2:],
        "shapes": module.shapes[-2:],
        "shown": module.shown,
        "logged": logged,
        "predictions": [each.flatten().tolist() for each in predictions or []],
        "tried": [line for line in lines if "It is tried in the global view" in line],
        "error": error,
    }


def late(world: int, options: dict[str, Any]) -> dict[str, Any]:
    """Fit with gradient accumulation and a validation within it."""
    module, made = Late(), rows(LENGTH, 24)
    for row in made:
        row |= {"attention_mask": torch.ones_like(row["input_ids"]), "shift_labels": row["input_ids"].roll(-1)}
    trainer = pl.Trainer(
        accelerator="cpu", devices=world, strategy=SequenceParallelStrategy(**options) if options else "auto", max_epochs=1,
        precision="64-true", logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        num_sanity_val_steps=0, accumulate_grad_batches=2, val_check_interval=1,
    )  # fmt: skip
    with told() as lines:
        trainer.fit(module, DataLoader(made, batch_size=4), DataLoader(made[:8], batch_size=4))
    return {
        "losses": module.losses[-6:],
        "logged": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "shapes": module.shapes,
        "tried": [line for line in lines if "It is tried in the global view" in line],
    }


def strided(module: Any, batch: Any) -> Tensor:
    """What is refused in both views."""
    x = module.model.hidden(batch["input_ids"])
    x = x.as_strided(x.shape, x.stride())
    return F.mse_loss(x, torch.zeros_like(x))
