"""What runs in the ranks: steps that keep tensors: each batch's predictions, a table of positions beside what they draw."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_sp.errors import SequenceParallelError
from tests.instruments.told import told
from tests.trainer.tiny import Plain, TokenDataset, _full, quiet_trainer, tiny_llama


class Keeping(Plain):
    def __init__(self, weight: float) -> None:
        super().__init__(tiny_llama)
        self.weight, self.kept = weight, dict[int, Tensor]()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits = self.logits(batch)
        loss = F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten())
        if batch_idx in self.kept and self.weight:
            loss = loss + self.weight * (logits.softmax(-1) - self.kept[batch_idx]).square().mean()
        self.kept[batch_idx] = logits.detach().softmax(-1)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def fit(world: int, weight: float) -> dict[str, Any]:
    """Return the weights of two epochs, and whether the step ended in the global view."""
    torch.manual_seed(3)
    module = Keeping(weight)
    trainer = quiet_trainer(world, strategy={"ring_size": 2, "global_view": "auto"} if world > 1 else {}, max_epochs=2)
    trainer.fit(module, DataLoader(TokenDataset(4), batch_size=2))
    weights = {name: _full(each.detach()).clone() for name, each in module.named_parameters()}
    return {"weights": weights, "whole": getattr(trainer.strategy, "sees_whole_sequences", None)}


class Reading(Plain):
    """A step that reads what its first one has left; behind that it may take a mean over tokens of squares, which is a part's."""

    def __init__(self, by: str, weight: float) -> None:
        super().__init__(tiny_llama)
        self.by, self.weight, self.calls, self.kept = by, weight, 0, list[float]()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits = self.logits(batch)
        loss = F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten())
        if (self.calls if self.by == "calls" else self.global_step) == 0:
            self.first, self.way = loss.detach(), "squares"
        else:
            if self.by == "step":
                loss = loss + 0.0 * self.first
            if self.by == "length":
                loss = loss + 0.0 * self.kept[-1]
            assert self.way == "squares"
            loss = loss + self.weight * logits.square().mean(1).square().mean()
        self.calls += 1
        self.kept.append(1.0)
        return loss


def read(by: str, weight: float) -> tuple[str, list[str]]:
    """Return what refuses the run, and what the preflight says that it has not compared."""
    torch.manual_seed(3)
    trainer = quiet_trainer(2, strategy={"ring_size": 2}, max_steps=3, max_epochs=-1)
    refusal = ""
    with told() as said:
        try:
            trainer.fit(Reading(by, weight), DataLoader(TokenDataset(8), batch_size=2))
        except SequenceParallelError as error:
            refusal = str(error)
    return refusal, [each for each in said if "not compared" in each]


class Drawing(Plain):
    """A masked diffusion: it draws which tokens are hidden, and makes its table of positions in its first step."""

    def __init__(self) -> None:
        super().__init__(tiny_llama)
        self.table: Tensor | None = None

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        ids = batch["input_ids"]
        if self.table is None:
            self.table = torch.arange(ids.shape[1]).sin().repeat(len(ids), 1)
        hidden = torch.rand(ids.shape) < 0.5
        logits = self.model(torch.where(hidden, 0, ids), batch["position_ids"]) * self.table[..., None].to(ids.device)
        return (F.cross_entropy(logits.mT, ids, reduction="none") * hidden).sum() / hidden.sum()


def draw() -> tuple[bool, int]:
    """Return whether the step was carried in the global view, and how many optimizer steps it did."""
    torch.manual_seed(3)
    trainer = quiet_trainer(2, strategy={"global_view": "auto"})
    trainer.fit(Drawing(), DataLoader(TokenDataset(4), batch_size=2))
    return trainer.strategy.sees_whole_sequences, trainer.global_step  # type: ignore[attr-defined]
