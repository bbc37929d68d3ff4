"""Rows of one token, each with a class: a step of decoding, or a table of words"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from tests.flows.tiny import VOCABULARY, Tuned, llama


class Module(Tuned):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.model(input_ids=batch["input_ids"]).logits[:, -1], batch["classes"])


def main(batch_size: int, **options: Any) -> Any:
    module, drawn = Module(llama()), torch.Generator().manual_seed(0)
    samples = [
        {
            "input_ids": torch.randint(6, VOCABULARY, (1,), generator=drawn),
            "classes": torch.randint(0, 4, (), generator=drawn),
        }
        for _ in range(12)
    ]
    pl.Trainer(max_epochs=1, **options).fit(module, DataLoader(samples, batch_size=batch_size))  # type: ignore[arg-type]
    return module, {}
