"""Two optimizers by hand, each toggled in its turn, over layers that are the LightningModule's own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_sp import SequenceParallelStrategy
from tests.trainer.tiny import VOCAB, TokenDataset, tiny_llama


class Taking(pl.LightningModule):
    """The gradient of one turn is not put to zero before the next one: a weight that is toggled off must have none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.embed, self.qkv, self.head = nn.Embedding(VOCAB, 16), nn.Linear(16, 48), nn.Linear(16, VOCAB)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            self.manual_backward(self.loss(batch))
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)

    def loss(self, batch: Any) -> Tensor:
        x = self.embed(batch["input_ids"])
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return F.cross_entropy(self.head(x).flatten(0, 1), batch["shift_labels"].flatten())

    def configure_optimizers(self) -> Any:
        first = [*self.embed.parameters(), *self.qkv.parameters()]
        return torch.optim.SGD(first, lr=0.1), torch.optim.SGD(self.head.parameters(), lr=0.1)


class Switching(Taking):
    """Layers are switched by the module, which shows whole weights in a step: for a turn, or for good by one of several steps."""

    def __init__(self, for_good: bool) -> None:
        super().__init__()
        self.for_good, self.automatic_optimization = for_good, for_good
        self.other = nn.Linear(16, 16)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:  # type: ignore[override]
        if self.for_good:
            if batch_idx == 1:
                self.other.requires_grad_(False)
            return self.loss(batch)
        for optimizer, learns in zip(reversed(self.optimizers()), (False, True), strict=True):
            self.embed.requires_grad_(learns)
            self.manual_backward(self.loss(batch))
            optimizer.step()
            self.embed.requires_grad_(True)
        return None

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + self.other(self.embed(batch["input_ids"])).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1) if self.for_good else super().configure_optimizers()


class OfModel(Taking):
    """A head of a model stays whole behind a forward, which no backward follows before it is toggled, or learns alone in its turn."""

    def __init__(self, in_first: int, is_abandoned: bool) -> None:
        super().__init__()
        self.in_first, self.is_abandoned = in_first, is_abandoned
        self.embed = self.qkv = self.head = None
        self.model = tiny_llama()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        if self.is_abandoned:
            self.loss(batch)
        super().training_step(batch, batch_idx)

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(
            self.model(batch["input_ids"], batch["position_ids"]).flatten(0, 1), batch["shift_labels"].flatten()
        )

    def configure_optimizers(self) -> Any:
        weights = list(self.model.parameters())
        return torch.optim.SGD(weights[: self.in_first], lr=0.1), torch.optim.SGD(weights[self.in_first :], lr=0.1)


MODULES: dict[str, Callable[[], Any]] = {
    "toggled": Taking,
    "switched for a turn": partial(Switching, False),
    "switched for good": partial(Switching, True),
    "toggled behind a forward": partial(OfModel, 4, True),
    "a head alone": partial(OfModel, -1, False),
}


def trained(name: str, world: int) -> dict[str, Tensor]:
    """Return the weights after some steps."""
    module = MODULES[name]()
    trainer = pl.Trainer(
        accelerator="cpu", devices=world, strategy=SequenceParallelStrategy(ring_size=world) if world > 1 else "auto", max_steps=4,
        precision="64-true", logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(TokenDataset(6), batch_size=2))
    weights: dict[str, Any] = {name: each.detach() for name, each in module.named_parameters()}
    return {n: (w.full_tensor() if hasattr(w, "full_tensor") else w).clone() for n, w in weights.items()}
