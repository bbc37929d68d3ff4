"""A parser: each word's head is a place in its row, which words of one rank alone have beyond that rank's part"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.flows.tiny import Tuned, llama, rows

LENGTH = 24


class Parser(Tuned):
    def __init__(self) -> None:
        super().__init__(llama().model)
        self.dependent, self.head = nn.Linear(32, 8), nn.Linear(32, 8)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.model(batch["input_ids"]).last_hidden_state
        scores = self.dependent(hidden) @ self.head(hidden).transpose(1, 2)
        loss = F.cross_entropy(scores.flatten(0, 1), batch["heads"].flatten())
        self.log("train_loss", loss, sync_dist=True)
        return loss


def main(batch_size: int, **options: Any) -> Any:
    places = torch.arange(LENGTH)
    middle = (places >= LENGTH // 4) & (places < LENGTH // 4 * 3)  # what rank 1 of 2 has
    samples = [
        {
            "input_ids": row["input_ids"],
            "heads": torch.where(middle, (places * 7 + i) % LENGTH, (places * 5 + i) % (LENGTH // 2)),
        }
        for i, row in enumerate(rows(length=LENGTH))
    ]
    module = Parser()
    pl.Trainer(max_epochs=1, **options).fit(module, DataLoader(samples, batch_size=batch_size))
    return module
