"""What runs in the ranks: a step that writes each row's loss into its data, which weighs the row by it in the next epoch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, Subset, WeightedRandomSampler

from lightning_sp import SequenceParallelStrategy
from lightning_sp.reductions import batch_mean
from lightning_sp.testing import trainer_of_ranks
from tests.preflight.lengths.untried_length_ranks import WORDS, User
from tests.trainer.tiny import _full

ROWS = 4


class Weighed(Dataset[dict[str, Tensor]]):
    """Rows with a weight each, from a table that a step writes."""

    def __init__(self, table: Any) -> None:
        self.ids = torch.randint(0, WORDS, (ROWS, 17), generator=torch.Generator().manual_seed(5))
        self.table = table

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        weight = torch.as_tensor(float(self.table[i]), dtype=torch.float64)
        return {
            "input_ids": self.ids[i, :-1],
            "shift_labels": self.ids[i, 1:],
            "row": torch.tensor(i),
            "weight": weight,
        }


class Hardest(Sampler[int]):
    """Rows in the order of a table."""

    def __init__(self, table: Any) -> None:
        self.weights = table

    def __len__(self) -> int:
        return ROWS

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(range(ROWS), key=lambda i: -float(self.weights[i])))


class Weighing:
    """A collate function that weighs rows by a table."""

    def __init__(self, table: Any) -> None:
        self.table = table

    def __call__(self, samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        batch = torch.utils.data.default_collate(samples)
        return {**batch, "weight": torch.tensor([float(self.table[i]) for i in batch["row"]], dtype=torch.float64)}


class Data(pl.LightningDataModule):
    """The same with the table in the data module."""

    def __init__(self, table: Any) -> None:
        super().__init__()
        self.table = table

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return DataLoader(Weighed(self.table), batch_size=2)


class Writing(User):
    """A step that writes where it is told: through the loader, into its sampler, the data module, or a data set that it closes over."""

    def __init__(self, where: str, data: Weighed) -> None:
        super().__init__(above=10_000, less=False)
        self.where = where
        if where == "closure":
            self.closed_over = lambda: data

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits, targets = self.net(batch["input_ids"]), batch["shift_labels"]
        each = F.cross_entropy(logits.movedim(-1, 1), targets, reduction="none")
        trainer: Any = self.trainer
        found = {
            "loader": lambda: trainer.train_dataloader.dataset.dataset.table,
            "module": lambda: trainer.datamodule.table,
            "collate": lambda: trainer.train_dataloader.collate_fn.table,
            "sampler": lambda: trainer.train_dataloader.sampler.weights,
            "closure": lambda: self.closed_over().table,
        }
        table = found[self.where]()
        for row, loss in zip(batch["row"].tolist(), each.detach().mean(1).tolist(), strict=True):
            # Of what a trial has left there an average has its part.
            table[row] = {"sampler": loss**8, "module": (float(table[row]) + loss) / 2}.get(self.where, loss)
        loss = batch_mean(each * batch["weight"][:, None], torch.ones_like(targets))
        self.losses.append(float(loss.detach()))
        return loss


def fit(world: int, options: dict[str, Any] | None, where: str, kind: str) -> dict[str, Any]:
    """Train two epochs of two batches; return losses, weights, the table, and whether it ended in the global view."""
    tables = {"tensor": torch.ones(ROWS, dtype=torch.float64), "array": np.ones(ROWS), "list": [1.0] * ROWS}
    table = tables[kind]
    data = Weighed(table)
    module = Writing(where, data)
    strategy: Any = "auto" if options is None else SequenceParallelStrategy(**options)
    trainer = pl.Trainer(
        strategy=strategy, **trainer_of_ranks(world), logger=False, enable_checkpointing=False, max_epochs=2,
        enable_progress_bar=False, enable_model_summary=False, precision="64-true",
    )  # fmt: skip
    if where == "module":
        trainer.fit(module, datamodule=Data(table))
    elif where == "collate":
        trainer.fit(module, DataLoader(Weighed([1.0] * ROWS), batch_size=2, collate_fn=Weighing(table)))
    elif where == "sampler":
        draws = WeightedRandomSampler(table, ROWS, generator=torch.Generator().manual_seed(3))
        order = Hardest(table) if kind == "list" else draws
        trainer.fit(module, DataLoader(Weighed([1.0] * ROWS), batch_size=2, sampler=order))
        table = order.weights
    else:
        trainer.fit(module, DataLoader(Subset(data, range(ROWS)), batch_size=2))
    weights = {name: _full(each.detach()).clone() for name, each in module.named_parameters()}
    return {
        "losses": module.losses,
        "weights": weights,
        "table": list(map(float, table)),
        "whole": options is not None and strategy.sees_whole_sequences,
    }
