"""What runs in the ranks: a step that keeps each row's loss, or how often it came, outside of its module, and weighs the row by it later."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_sp import SequenceParallelStrategy
from lightning_sp.reductions import batch_mean
from lightning_sp.testing import trainer_of_ranks
from tests.preflight.lengths.untried_length_ranks import WORDS, User
from tests.trainer.tiny import _full

OF_FILE: dict[int, float] = {}


class Weighing(User):
    of_class: dict[int, float] = {}  # noqa: RUF012

    def __init__(self, where: str) -> None:
        super().__init__(above=10_000, less=False)
        closed_over: dict[int, float] = {}

        def of_closure() -> dict[int, float]:
            return closed_over

        places: dict[str, Any] = {"file": lambda: OF_FILE, "class": lambda: Weighing.of_class, "closure": of_closure}
        self.table = places[where]

    def names_of(self, batch: dict[str, Tensor]) -> list[int]:
        names: list[int] = batch["row"].tolist()
        return names

    def numbers_of(self, rows: list[int], each: Tensor) -> list[float]:
        numbers: list[float] = each.detach().mean(1).tolist()
        return numbers

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits, targets, table = self.net(batch["input_ids"]), batch["shift_labels"], self.table()
        each = F.cross_entropy(logits.movedim(-1, 1), targets, reduction="none")
        rows = self.names_of(batch)
        weights = torch.tensor([table.get(row, 1.0) for row in rows], dtype=each.dtype)
        table.update(zip(rows, self.numbers_of(rows, each), strict=True))
        loss = batch_mean(each * weights[:, None], torch.ones_like(targets))
        self.losses.append(float(loss.detach()))
        return loss


class Naming(Weighing):
    """Knows rows again by a hash of their tokens, and weighs each by how often it was seen."""

    def __init__(self) -> None:
        super().__init__("closure")

    def names_of(self, batch: dict[str, Tensor]) -> list[int]:
        return [hash(row.numpy().tobytes()) for row in batch["input_ids"]]

    def numbers_of(self, rows: list[int], each: Tensor) -> list[float]:
        return [self.table().get(row, 1.0) + 1 for row in rows]


def fit(world: int, options: dict[str, Any] | None, where: str) -> dict[str, Any]:
    """Train two epochs of two batches; return losses, weights, and whether it ended in the global view."""
    OF_FILE.clear()
    Weighing.of_class.clear()
    ids = torch.randint(0, WORDS, (4, 17), generator=torch.Generator().manual_seed(5))
    data = [{"input_ids": row[:-1], "shift_labels": row[1:], "row": torch.tensor(i)} for i, row in enumerate(ids)]
    module = Naming() if where == "named by tokens" else Weighing(where)
    strategy: Any = "auto" if options is None else SequenceParallelStrategy(**options)
    trainer = pl.Trainer(
        strategy=strategy, **trainer_of_ranks(world), logger=False, enable_checkpointing=False, max_epochs=2,
        enable_progress_bar=False, enable_model_summary=False, precision="64-true",
    )  # fmt: skip
    trainer.fit(module, DataLoader(data, batch_size=2))
    weights = {name: _full(each.detach()).clone() for name, each in module.named_parameters()}
    return {
        "losses": module.losses,
        "weights": weights,
        "whole": options is not None and strategy.sees_whole_sequences,
    }
