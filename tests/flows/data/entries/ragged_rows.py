"""Rows in a list, each of a length of its own, that the step pads by itself"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from tests.flows.tiny import Tuned, llama, rows


class Module(Tuned):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids = pad_sequence(batch["input_ids"], batch_first=True)
        labels = pad_sequence(batch["labels"], batch_first=True, padding_value=-100)
        return F.cross_entropy(self.model(input_ids=ids).logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


def listed(samples: list[Any]) -> dict[str, list[Tensor]]:
    ids = [each["input_ids"][: 9 + 2 * i] for i, each in enumerate(samples)]
    return {"input_ids": [row[:-1] for row in ids], "labels": [row[1:] for row in ids]}


def main(batch_size: int, **options: Any) -> Any:
    module = Module(llama())
    pl.Trainer(max_epochs=1, **options).fit(module, DataLoader(rows(), batch_size, collate_fn=listed))  # type: ignore[arg-type]
    return module, {}
