"""Pairs of tokens: a map of contacts that is made symmetric and corrected by its rows and columns (ESM), and a biaffine layer's classes"""

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
        self.left, self.right, self.contact = nn.Linear(32, 4), nn.Linear(32, 4), nn.Linear(4, 1)
        self.classes = nn.Parameter(torch.randn(3, 4, 4) * 0.3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids, hidden = batch["input_ids"], self.model(batch["input_ids"]).last_hidden_state
        left, right = self.left(hidden), self.right(hidden)
        pairs = left[:, :, None] * right[:, None]
        pairs = pairs + pairs.transpose(1, 2)
        pairs = pairs - pairs.sum(1, keepdim=True) * pairs.sum(2, keepdim=True) / pairs.sum((1, 2), keepdim=True)
        wanted = ((ids[:, :, None] + ids[:, None]) % 2).to(pairs)
        near = F.binary_cross_entropy_with_logits(self.contact(pairs).squeeze(-1), wanted)
        kinds = torch.einsum("bxi,oij,byj->boxy", left, self.classes, right)
        loss = near + F.cross_entropy(kinds, (ids[:, :, None] + 2 * ids[:, None]) % 3)
        self.log("train_loss", loss, sync_dist=True)
        return loss


def main(batch_size: int, **options: Any) -> Any:
    samples = [{"input_ids": row["input_ids"]} for row in rows(length=12)]
    module = Module()
    pl.Trainer(max_epochs=1, **options).fit(module, DataLoader(samples, batch_size=batch_size))
    return module
