"""A graph transformer: distances of each two atoms as a bias, bonds as labels, and a mask of pairs that is one for all rows."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

ATOMS, BONDS = 90, 3


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.atoms, self.bias = nn.Linear(5, 16), nn.Embedding(7, 4)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.left, self.right, self.bonds = nn.Linear(16, 8), nn.Linear(16, 8), nn.Linear(8, BONDS)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.atoms(batch["atoms"])
        bias = self.bias(batch["distances"]).permute(0, 3, 1, 2)
        bias = bias.masked_fill(~batch["near"], float("-inf"))
        q, k, v = (each.unflatten(2, (4, 4)).transpose(1, 2) for each in self.qkv(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        pairs = torch.tanh(self.left(x)[:, :, None] + self.right(x)[:, None])
        loss = F.cross_entropy(self.bonds(pairs).reshape(-1, BONDS), batch["bonds"].reshape(-1))
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def rows(number: int = 12) -> list[dict[str, Tensor]]:
    g = torch.Generator().manual_seed(0)
    return [
        {
            "atoms": torch.randn(ATOMS, 5, generator=g, dtype=torch.float64),
            "distances": torch.randint(7, (ATOMS, ATOMS), generator=g),
            "bonds": torch.randint(BONDS, (ATOMS, ATOMS), generator=g).masked_fill(
                torch.ones(ATOMS, ATOMS).triu() == 0, -100
            ),
        }
        for _ in range(number)
    ]


def collate(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    places = torch.arange(ATOMS)
    return {**default_collate(samples), "near": (places[:, None] - places).abs() < 70}


def main(batch_size: int, **options: Any) -> Any:
    module = Module()
    loader = DataLoader(rows(), batch_size=batch_size, collate_fn=collate)
    pl.Trainer(max_epochs=1, **options).fit(module, loader)
    return module
