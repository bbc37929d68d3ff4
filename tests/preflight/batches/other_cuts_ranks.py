"""What runs in the ranks: a step that groups neighbouring tokens, on sequences that parts of other lengths cut within a group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_sp import SequenceParallelStrategy
from lightning_sp.testing import trainer_of_ranks
from tests.preflight.lengths.untried_length_ranks import WORDS, User
from tests.trainer.tiny import _full


class Grouping(User):
    """Adds to each token what its group of neighbours has on the average, or reads every second target alone."""

    def __init__(self, what: str) -> None:
        super().__init__(above=10_000, less=False)
        self.what = what

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits, targets = self.net(batch["input_ids"]), batch["shift_labels"]
        if self.what == "pairs":
            means = logits.unflatten(1, (-1, 2)).mean(2, keepdim=True)
            logits = logits + means.expand(-1, -1, 2, -1).flatten(1, 2)
        elif self.what == "every second":
            logits, targets = logits[:, ::2], targets[:, ::2]
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        self.log("train_loss", loss)
        self.losses.append(float(loss.detach()))
        return loss


def fit(world: int, options: dict[str, Any] | None, what: str, lengths: Sequence[int], **more: Any) -> dict[str, Any]:
    """Train a batch of two rows of each length; return losses, weights, how often the step ran, and whether it ended in the global view."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, WORDS, (2 * len(lengths), max(lengths) + 1), generator=generator)
    data = [
        {"input_ids": row[: lengths[i // 2]], "shift_labels": row[1 : lengths[i // 2] + 1]} for i, row in enumerate(ids)
    ]
    module = Grouping(what)
    strategy: Any = "auto" if options is None else SequenceParallelStrategy(**options)
    trainer = pl.Trainer(
        strategy=strategy, **trainer_of_ranks(world), logger=False, enable_checkpointing=False, max_epochs=1,
        enable_progress_bar=False, enable_model_summary=False, precision="64-true", **more,
    )  # fmt: skip
    trainer.fit(module, DataLoader(data, batch_size=2))
    weights = {name: _full(each.detach()).clone() for name, each in module.named_parameters()}
    whole = options is not None and strategy.sees_whole_sequences
    return {"losses": module.losses, "weights": weights, "whole": whole}
