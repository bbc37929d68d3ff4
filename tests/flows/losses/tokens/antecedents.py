"""Each token points at another one of its row: targets are places in the sequence, of 96 tokens, validated by a share of right ones"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.flows.tiny import Tuned, llama, rows


class Module(Tuned):
    def __init__(self) -> None:
        super().__init__(llama().model)
        self.asks, self.answers = nn.Linear(32, 16), nn.Linear(32, 16)

    def scores(self, batch: Any) -> Tensor:
        hidden = self.model(batch["input_ids"]).last_hidden_state
        return self.asks(hidden) @ self.answers(hidden).transpose(1, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.scores(batch).flatten(0, 1), batch["antecedent"].flatten())
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        right = self.scores(batch).argmax(-1) == batch["antecedent"]
        self.log("right", right.double().mean(), sync_dist=True)


def main(batch_size: int, **options: Any) -> Any:
    drawn = torch.Generator().manual_seed(5)
    samples = [
        {"input_ids": row["input_ids"], "antecedent": torch.randint(96, (96,), generator=drawn)}
        for row in rows(length=96)
    ]
    module = Module()
    loaders = DataLoader(samples, batch_size=batch_size), DataLoader(samples[:4], batch_size=batch_size)
    pl.Trainer(max_epochs=1, **options).fit(module, *loaders)
    return module
