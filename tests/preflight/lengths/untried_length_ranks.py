"""What runs in the ranks: a model that branches on a length which no crop reaches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_sp import SequenceParallelError, SequenceParallelStrategy
from lightning_sp.preflight.crops import shared_crop
from lightning_sp.testing import trainer_of_ranks
from tests.instruments.record import Record
from tests.trainer.tiny import _full

LENGTH, WORDS = 256, 17


class Branching(nn.Module):
    """Attends, and adds something beyond a number of tokens."""

    def __init__(self, above: int, less: bool) -> None:
        super().__init__()
        self.above, self.less = above, less
        self.embedding, self.far = nn.Embedding(WORDS, 16), nn.Linear(16, 16)
        self.qkv, self.head = nn.Linear(16, 48), nn.Linear(16, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        q, k, v = (each.unflatten(-1, (2, 8)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        if self.above < 0:  # a number is another beyond that length, and no function
            x = x + torch.tanh(self.far(x) * (0.5 if ids.shape[1] > -self.above else 2.0))
        elif (ids.shape[1] > self.above) != self.less:
            x = x + torch.tanh(self.far(x))
        return self.head(x)


class User(pl.LightningModule):
    def __init__(self, above: int, less: bool, own_weight: bool = False) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.net, self.losses = Branching(above, less), Record()
        self.scale = nn.Parameter(torch.ones(WORDS)) if own_weight else torch.ones(())

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(
            (self.net(batch["input_ids"]) * self.scale).flatten(0, 1), batch["shift_labels"].flatten()
        )
        self.log("train_loss", loss)
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(
    world: int,
    options: dict[str, Any] | None,
    above: int,
    rows: int = 1,
    less: bool = False,
    lengths: Sequence[int] = (LENGTH, LENGTH),
    own_weight: bool = False,
    **more: Any,
) -> dict[str, Any] | str:
    """Train steps of 256 tokens, or of given lengths, of which crops have up to 64; return losses, weights, the view, or why it is refused."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, WORDS, (len(lengths) * rows, LENGTH + 1), generator=generator)
    data = [
        {"input_ids": row[:-1][: lengths[i // rows]], "shift_labels": row[1:][: lengths[i // rows]]}
        for i, row in enumerate(ids)
    ]
    module = User(above, less, own_weight)
    strategy: Any = "auto" if options is None else SequenceParallelStrategy(**options)
    trainer = pl.Trainer(
        strategy=strategy, **trainer_of_ranks(world), logger=False, enable_checkpointing=False, **{"max_epochs": 1, **more},
        enable_progress_bar=False, enable_model_summary=False, precision="64-true",
    )  # fmt: skip
    with patch.object(shared_crop, "LONGER_TOKENS", 64):
        try:
            trainer.fit(module, DataLoader(data, batch_size=rows))
        except SequenceParallelError as error:
            return str(error)
    weights = {name: _full(each.detach()).clone() for name, each in module.named_parameters()}
    return {
        "losses": module.losses,
        "weights": weights,
        "whole": options is not None and strategy.sees_whole_sequences,
    }
