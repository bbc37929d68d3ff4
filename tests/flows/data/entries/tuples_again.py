"""Tuples (tokens, targets) in more than one epoch, validated, tested and predicted with after the fit; positions counted in the forward."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.flows.tiny import VOCABULARY
from tests.flows.tiny import rows as named_rows


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(VOCABULARY, 16), nn.Embedding(64, 16)
        self.block = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        tokens = ids.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(tokens, device=ids.device)
        x = self.embed(ids) + self.places(torch.arange(tokens, device=ids.device))
        return self.head(self.block(x, src_mask=mask, is_causal=True))

    def loss(self, batch: Any) -> Tensor:
        ids, targets = batch
        return F.cross_entropy(self(ids).transpose(1, 2), targets)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0]).argmax(-1)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def rows(number: int = 12) -> list[tuple[Tensor, ...]]:
    return [tuple(row.values()) for row in named_rows(number)]


def main(batch_size: int, **options: Any) -> Any:
    module = Module()
    trainer = pl.Trainer(max_epochs=2, **options)
    trainer.fit(module, DataLoader(rows(), batch_size=batch_size), DataLoader(rows(8), batch_size=batch_size))
    numbers = {"val_loss_of_the_fit": float(trainer.callback_metrics["val_loss"])}
    [tested] = trainer.test(module, DataLoader(rows(8), batch_size=batch_size), verbose=False)
    predicted = trainer.predict(module, DataLoader(rows(8), batch_size=batch_size))
    return module, {**numbers, **tested, "predicted": torch.cat(predicted)}
