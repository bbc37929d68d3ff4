"""Batches of a class of one's own: a dataclass in training, an object with `.to()` in validation, a NamedTuple in prediction"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from tests.flows.tiny import Tuned, llama, rows


@dataclass
class Tokens:
    input_ids: Tensor
    shift_labels: Tensor
    names: list[str]


class Example(NamedTuple):
    input_ids: Tensor
    shift_labels: Tensor


class Texts:
    def __init__(self, input_ids: Tensor, shift_labels: Tensor) -> None:
        self.input_ids, self.shift_labels = input_ids, shift_labels

    def to(self, device: Any, **_: Any) -> Texts:
        return Texts(self.input_ids.to(device), self.shift_labels.to(device))


class Module(Tuned):
    def loss(self, batch: Any) -> Tensor:
        logits = self.model(input_ids=batch.input_ids).logits
        return F.cross_entropy(logits.flatten(0, 1), batch.shift_labels.flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert isinstance(batch, Tokens)
        assert len(batch.names) == len(batch.input_ids)
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        assert isinstance(batch, Texts)
        self.log("val_loss", self.loss(batch), batch_size=len(batch.input_ids), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert isinstance(batch, Example)
        return self.model(input_ids=batch.input_ids).logits


def stacked(samples: list[Any]) -> tuple[Tensor, Tensor]:
    return torch.stack([each["input_ids"] for each in samples]), torch.stack([each["shift_labels"] for each in samples])


def main(batch_size: int, **options: Any) -> Any:
    module, samples = Module(llama()), rows()
    train = DataLoader(samples, batch_size, collate_fn=lambda each: Tokens(*stacked(each), names=["a"] * len(each)))  # type: ignore[arg-type]
    validate = DataLoader(samples, batch_size, collate_fn=lambda each: Texts(*stacked(each)))  # type: ignore[arg-type]
    predict = DataLoader(samples, batch_size, collate_fn=lambda each: Example(*stacked(each)))  # type: ignore[arg-type]
    trainer = pl.Trainer(max_epochs=1, **options)
    trainer.fit(module, train, validate)
    predicted = trainer.predict(module, predict)
    assert predicted is not None
    return module, {"predicted": torch.cat(predicted)}  # type: ignore[arg-type]
