"""Perceiver IO by hand: learned latents read the sequence, and it asks them: torch's attention of whole queries and of whole keys."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.flows.tiny import VOCABULARY, rows


class Cross(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.queries, self.keys, self.out = nn.Linear(16, 16), nn.Linear(16, 32), nn.Linear(16, 16)

    def forward(self, asks: Tensor, asked: Tensor, mask: Tensor | None = None) -> Tensor:
        q = self.queries(asks).unflatten(-1, (4, 4)).transpose(1, 2)
        k, v = (each.unflatten(-1, (4, 4)).transpose(1, 2) for each in self.keys(asked).chunk(2, dim=-1))
        return self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(VOCABULARY, 16), nn.Parameter(torch.randn(64, 16))
        self.latents, self.head = nn.Parameter(torch.randn(5, 16)), nn.Linear(16, VOCABULARY)
        self.reads, self.thinks, self.answers = Cross(), Cross(), Cross()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids = batch["input_ids"]
        x = self.embed(ids) + self.places[: ids.shape[1]]
        latents = self.latents.expand(len(ids), -1, -1)
        latents = latents + self.reads(latents, x, (ids % 5 != 0)[:, None, None])
        latents = latents + self.thinks(latents, latents)
        logits = self.head(x + self.answers(x, latents))
        loss = F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten())
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def main(batch_size: int, **options: Any) -> Any:
    module = Module()
    pl.Trainer(max_epochs=1, **options).fit(module, DataLoader(rows(), batch_size=batch_size))
    return module
