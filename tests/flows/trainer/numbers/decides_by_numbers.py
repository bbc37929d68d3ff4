"""A step that decides by numbers of its tokens: a loss that counts twice in batches of many long words, and a rate by distinct ones, by NumPy"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from tests.flows.tiny import Tuned, llama, rows

# Each data-parallel group decides by its own rows.
LAYOUTS = ["ulysses 2", "ring 2"]


class Module(Tuned):
    def __init__(self) -> None:
        super().__init__(llama())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids = batch["input_ids"]
        logits = self.model(ids).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten())
        distinct = np.unique(ids.cpu().numpy()).size
        self.optimizers().param_groups[0]["lr"] = 0.02 if distinct > 31 else 0.05  # type: ignore[union-attr]
        return 2 * loss if (ids > 30).sum().item() > 24 else loss


def main(batch_size: int, **options: Any) -> Any:
    module = Module()
    trainer = pl.Trainer(max_epochs=1, **options)
    trainer.fit(module, DataLoader(rows(), batch_size=batch_size))
    return module
