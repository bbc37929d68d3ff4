"""Batches within a batch: a tuple of inputs and labels, and a dict of a dict of inputs beside the labels in validation"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from tests.flows.tiny import Tuned, llama, rows


class Module(Tuned):
    def loss(self, inputs: Any, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.model(**inputs).logits.flatten(0, 1), labels.flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, labels = batch
        return self.loss(inputs, labels)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        labels = batch["shift_labels"]
        self.log("val_loss", self.loss(batch["inputs"], labels), batch_size=len(labels), sync_dist=True)


def nested(samples: list[Any]) -> dict[str, Any]:
    ids, labels = (torch.stack([each[name] for each in samples]) for name in ("input_ids", "shift_labels"))
    return {
        "inputs": {"input_ids": ids, "attention_mask": torch.ones_like(ids)},
        "shift_labels": labels,
        "meta": {"epoch": 0},
    }


def pair(samples: list[Any]) -> tuple[Any, Tensor]:
    batch = nested(samples)
    return batch["inputs"], batch["shift_labels"]


def main(batch_size: int, **options: Any) -> Any:
    module = Module(llama())
    train, validate = (DataLoader(rows(), batch_size, collate_fn=each) for each in (pair, nested))  # type: ignore[arg-type]
    pl.Trainer(max_epochs=1, **options).fit(module, train, validate)
    return module, {}
