"""What each rank runs in test_lone_errors.py: steps that one rank alone fails in, while the others go on to their next collective."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_sp import SequenceParallelError
from lightning_sp.testing import max_error
from tests.instruments.told import told
from tests.trainer.tiny import Plain, TokenDataset, _full, quiet_trainer, tiny_llama

MARK = 7


class Checked(torch.autograd.Function):
    """Gives what it is given, and fails in the backward without a mark."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, has_mark: bool) -> Tensor:
        ctx.has_mark = has_mark
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        if not ctx.has_mark:
            raise ArithmeticError("no mark among these tokens")
        return gradients[0].clone(), None


class Marked(Plain):
    """Fails on tokens without a mark: in the middle of a forward, when its loss is made, or in the backward; or on rank 1, whole."""

    def __init__(self, place: str) -> None:
        super().__init__(lambda: tiny_llama(num_layers=2))
        self.place = place
        self.marks = nn.Parameter(torch.ones(32))

    def configure_model(self) -> None:
        if self.model is None:
            super().configure_model()
            self.model.layers[1].register_forward_pre_hook(lambda _, inputs: self._check("block"))
            self.model.embedding.register_forward_hook(
                lambda _, inputs, output: self._follow(output, "last of the backward")
            )
            self.model.layers[0].register_forward_hook(
                lambda _, inputs, output: self._follow(output, "block's backward")
            )

    def _follow(self, output: Tensor, place: str) -> Tensor:
        return Checked.apply(output, bool((self.ids == MARK).any())) if place == self.place else output

    def _check(self, place: str) -> None:
        if (place, self.place) == ("step", "whole run") and self.ids.shape[1] == 32 and dist.get_rank() == 1:
            raise ZeroDivisionError("rank 1 alone")  # told before others, though behind them in the alphabet
        if place == self.place and not bool((self.ids == MARK).any()):
            raise ArithmeticError("no mark among these tokens")

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.ids = batch["input_ids"]
        self._check("step")
        logits = self.logits(batch)
        loss = F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten())
        if self.place == "heads":
            loss = loss + F.cross_entropy((logits @ logits.transpose(1, 2)).flatten(0, 1), batch["heads"].flatten())
        self._check("loss")
        return self._follow(loss * self.marks.mean(), "backward")

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.ids = batch["input_ids"]
        self._check("step")
        loss = F.cross_entropy(self.logits(batch).flatten(0, 1), batch["shift_labels"].flatten())
        self._check("loss")
        self.log("loss", loss)


def rows() -> list[dict[str, Tensor]]:
    """Return rows with a mark on the second token, which the first rank of a sequence has."""
    made = list(TokenDataset(12))
    for row in made:
        row["input_ids"] = torch.where(row["input_ids"] == MARK, MARK + 1, row["input_ids"])
        row["input_ids"][1] = MARK
        row["heads"] = torch.arange(32).flip(0)  # places in the row, half of them beyond a part
    return made


def weights(world: int, place: str, strategy: Any = None) -> dict[str, Tensor]:
    """Return what three steps make of the weights, whole."""
    torch.manual_seed(3)
    module = Marked(place)
    trainer = quiet_trainer(world, strategy=strategy, max_steps=3)
    size = (strategy or {}).get("data_parallel_size", 1)
    trainer.fit(module, DataLoader(rows(), batch_size=4 // size, shuffle=False))
    return {name: _full(value.detach()) for name, value in module.named_parameters()}


def error_of_weights(world: int, place: str, expected: dict[str, Tensor], strategy: dict[str, Any]) -> float:
    """Return by how much the weights differ from those of one process."""
    found = weights(world, place, {**strategy, "global_view": "auto"})
    return max(max_error(value, expected[name]) for name, value in found.items())


def refusal(world: int, place: str, strategy: dict[str, Any]) -> str:
    """Return why a step that sees its part alone is refused."""
    try:
        weights(world, place, strategy)
    except SequenceParallelError as error:
        return str(error)
    return ""


def validated(world: int, strategy: dict[str, Any] | None = None, place: str = "loss", size: int = 4) -> float:
    """Return the loss of a validation without training."""
    torch.manual_seed(3)
    trainer = quiet_trainer(world, strategy=strategy)
    known = [{name: value for name, value in row.items() if name != "heads"} for row in rows()]
    return float(trainer.validate(Marked(place), DataLoader(known, batch_size=size), verbose=False)[0]["loss"])


def said_and_validated(strategy: dict[str, Any]) -> tuple[list[str], float]:
    """Return what rank 0 says of a validation that rank 1 fails in whole, and its loss."""
    with told() as lines:
        loss = validated(2, strategy, "whole run", 1)
    return [line for line in lines if line.startswith("preflight: ")], loss


def refusal_of_part(place: str) -> str:
    """Return why the step has gone on in the global view."""
    torch.manual_seed(3)
    trainer = quiet_trainer(2, strategy={"ring_size": 2, "global_view": "auto"}, max_steps=1)
    trainer.fit(Marked(place), DataLoader(rows(), batch_size=4))
    return str(trainer.strategy._views.refusal(""))
