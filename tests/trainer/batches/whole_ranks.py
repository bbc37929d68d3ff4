"""What each rank runs in test_whole_batches.py: a network of pictures, with and without dropout; returns plain values."""

from __future__ import annotations

import logging
import random
import warnings
from functools import partial
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, SumMetric

from lightning_sp import SequenceParallelError, SequenceParallelStrategy
from lightning_sp.models import GPT, GPTConfig
from lightning_sp.reductions import batch_mean, batch_sum, gather_rows, sequence_mean
from tests.instruments.record import Record
from tests.trainer.tiny import Plain, TokenDataset, _full, quiet_trainer, tiny_llama


class Net(nn.Module):
    """Patches of pictures, one layer of attention over them, a class for each picture."""

    def __init__(self, p: float = 0.0, heads: int = 2) -> None:
        super().__init__()
        self.patches, self.attention = nn.Conv2d(3, 16, 4, 4), nn.MultiheadAttention(16, heads, p, batch_first=True)
        self.drop, self.head = nn.Dropout(p), nn.Linear(16, 5)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.patches(pixels).flatten(2).transpose(1, 2)
        x = x + self.drop(self.attention(x, x, x, need_weights=False)[0])
        return self.head(sequence_mean(x))


class Pictures(pl.LightningModule):
    """Classes of pictures by a loss of choice; what it draws is kept."""

    def __init__(self, loss: str = "mean", p: float = 0.0, heads: int = 2) -> None:
        super().__init__()
        self.loss, self.p = loss, p
        self.model = Net(p, heads)
        self.mean, self.seen = MeanMetric(), SumMetric()
        self.losses = Record()
        self.draws: list[list[float]] = []
        self.validated: list[float] = []

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        pixels, classes = batch
        if self.p:
            self.draws.append([float(torch.rand(())), random.random(), float(np.random.rand())])
            pixels = pixels + self.p * torch.randn_like(pixels)
        return pixels, classes

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        pixels, classes = batch
        if self.p:
            self.draws.append([float(torch.rand(())), random.random(), float(np.random.beta(1, 1))])
            pixels = torch.lerp(pixels, pixels[torch.randperm(len(pixels))], 0.3 * random.random())
        logits = checkpoint(self.model, pixels, use_reentrant=False) if self.p else self.model(pixels)
        loss = self._loss(logits, classes)
        if self.p and self.loss == "generator":
            loss = loss * (1 + self.global_rank)
        self.losses.append(float(loss.detach()))
        self.log("rows", float(len(pixels)), reduce_fx="sum", sync_dist=True, on_epoch=True, on_step=False)
        return loss

    def _loss(self, logits: Tensor, classes: Tensor) -> Tensor:
        wanted = F.one_hot(classes, 5).to(logits)
        if self.loss == "sum":
            return F.cross_entropy(logits, classes, reduction="sum") / len(classes)
        if self.loss == "rows":
            each = F.mse_loss(logits, wanted, reduction="none")
            return batch_mean(each) + batch_sum(each.mean(1)) / 100
        if self.loss == "contrastive":
            own, every = F.normalize(logits, dim=1), gather_rows(F.normalize(logits, dim=1))
            return batch_mean(-(own @ every.T / 0.5).logsumexp(1)) + F.cross_entropy(logits, classes)
        if self.loss == "pixels":
            # A class for each of several places of a picture, (rows * 4): neither tokens nor rows.
            spread, places = logits[:, None].expand(-1, 4, -1).flatten(0, 1), classes.repeat_interleave(4)
            total = F.cross_entropy(spread, places, reduction="sum") / len(places)
            return total + F.cross_entropy(spread, places)
        if self.loss == "own mean":
            return F.mse_loss(logits, wanted)
        return F.cross_entropy(logits, classes)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pixels, classes = batch
        logits = self.model(pixels)
        self.validated.append(float(torch.rand(())))
        loss = F.cross_entropy(logits, classes)
        self.mean.update(loss, weight=len(pixels))
        self.seen.update(len(pixels))
        self.log("val_loss", loss, sync_dist=True, batch_size=len(pixels))
        self.log("val_rows", float(len(pixels)), reduce_fx="sum", sync_dist=True)
        self.log("val_mean", self.mean)
        self.log("val_seen", self.seen)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02)


def rows(number: int = 12) -> list[tuple[Tensor, int]]:
    g = torch.Generator().manual_seed(1)
    return [(torch.randn(3, 8, 8, generator=g), i % 5) for i in range(number)]


def trained(
    strategy: dict[str, Any] | None,
    micro: int,
    arguments: dict[str, Any],
    data: Any = None,
    options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Fit three optimizer steps, validate and predict; return what came of it, or the error. A strategy of None is plain Lightning's."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(4)
    module = Pictures(**arguments)
    world = dist.get_world_size() if strategy is not None else 1
    trainer = pl.Trainer(
        strategy="auto" if strategy is None else SequenceParallelStrategy(**strategy), accelerator="cpu", devices=world, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0, max_epochs=1,
        precision="64-true", **(options or {}),
    )  # fmt: skip
    found: dict[str, Any] = {"error": ""}
    loader = DataLoader(rows() if data is None else data, batch_size=micro)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.fit(module, loader, loader)
        except SequenceParallelError as error:
            return {"error": str(error), "losses": module.losses}
        found["metrics"] = {name: float(value) for name, value in trainer.callback_metrics.items()}
        found["predicted"] = torch.cat(trainer.predict(module, loader))
    found |= {"losses": module.losses, "draws": module.draws, "validated": module.validated}
    found["weights"] = {name: _full(each.detach()).clone() for name, each in module.named_parameters()}
    found["warnings"] = [str(each.message) for each in caught if "sequence_parallel:" in str(each.message)]
    found["groups"] = [each.process_group for each in (module.mean, module.seen)]
    return found


class Both(pl.LightningModule):
    """Batches of tokens and batches of pictures in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.pictures = tiny_llama(), Net()
        self.losses = Record()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch["pixel_values"] if "pixel_values" in batch else torch.zeros(2, 3, 8, 8).to(self.text.head.weight)
        of_pictures = F.cross_entropy(self.pictures(x), batch["labels"]) if "labels" in batch else None
        if of_pictures is None:
            logits = self.text(batch["input_ids"], batch["position_ids"])
            of_pictures = F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten())
        self.losses.append(float(of_pictures.detach()))
        return of_pictures

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def in_turn(strategy: dict[str, Any] | None) -> dict[str, Any]:
    """Train on a batch of pictures, one of tokens, one of pictures; return the losses and weights."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    torch.manual_seed(4)
    module, tokens = Both(), TokenDataset(2)
    pictures = [{"pixel_values": pixels, "labels": torch.tensor(number)} for pixels, number in rows(4)]
    data: list[Any] = [*pictures[:2], tokens[0], tokens[1], *pictures[2:]]
    world = dist.get_world_size() if strategy is not None else 1
    trainer = pl.Trainer(
        strategy="auto" if strategy is None else SequenceParallelStrategy(**strategy), accelerator="cpu", devices=world, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, max_epochs=1, precision="64-true",
    )  # fmt: skip
    trainer.fit(module, DataLoader(data, batch_size=2))  # type: ignore[arg-type]
    weights = {name: _full(each.detach()).clone() for name, each in module.named_parameters()}
    return {"losses": module.losses[-3:], "weights": weights}


def refusal_of_tokens() -> str:
    """Return why attention of one head over the sequence is refused with two Ulysses ranks."""
    config = GPTConfig(vocab_size=61, dim=32, num_layers=1, num_heads=1, max_positions=64)
    trainer = quiet_trainer(2, strategy={"ulysses_size": 2, "global_view": "auto"})
    try:
        trainer.fit(Plain(partial(GPT, config)), DataLoader(TokenDataset(4), batch_size=2))
    except SequenceParallelError as error:
        return str(error)
    return ""


def mixed_groups() -> str:
    """Give one data-parallel group tokens and the other pictures; return the refusal."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    tokens, pixels = TokenDataset(2), rows(1)[0][0]
    batch = {name: value[None] for name, value in tokens[0].items()}
    if dist.get_rank() > 1:
        batch = {"pixel_values": pixels[None], "labels": torch.tensor([1])}
    trainer = pl.Trainer(
        strategy=SequenceParallelStrategy(data_parallel_size=2, ring_size=2), accelerator="cpu", devices=4, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, max_epochs=1, precision="64-true",
        use_distributed_sampler=False,
    )  # fmt: skip
    try:
        trainer.fit(Both(), DataLoader([batch], batch_size=None))  # type: ignore[arg-type]
    except SequenceParallelError as error:
        return str(error)
    return "not refused"


class Words(pl.LightningModule):
    """A class for each word: rows of one number, of no sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 3))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.model(batch), batch % 3)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def words(strategy: dict[str, Any] | None, micro: int) -> dict[str, Tensor]:
    """Train on ids (B,); return the weights."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    module = Words()
    trainer = pl.Trainer(
        strategy="auto" if strategy is None else SequenceParallelStrategy(**strategy), accelerator="cpu",
        devices=1 if strategy is None else dist.get_world_size(), logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, max_epochs=1, precision="64-true",
    )  # fmt: skip
    trainer.fit(module, DataLoader(torch.arange(12) * 5 % 11, batch_size=micro))  # type: ignore[arg-type]
    return {name: _full(each.detach()).clone() for name, each in module.named_parameters()}
