"""What each rank runs in test_late_numbers.py: a step that logs one more number, of whole rows, in some batches alone."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from tests.flows.tiny import Tuned, llama, rows
from tests.instruments.told import told
from tests.trainer.tiny import quiet_trainer


class Late(Tuned):
    def __init__(self, kind: str) -> None:
        super().__init__(llama(num_hidden_layers=1))
        self.kind = kind

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.model(batch["input_ids"]).logits
        if batch_idx == 1 if self.kind == "second batch" else self.current_epoch == 1:
            self.log("largest", logits.amax((1, 2)).mean())
        return F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten())


def fit(kind: str) -> list[str]:
    """Return what was said of the number."""
    torch.manual_seed(3)
    with told() as said:
        trainer = quiet_trainer(2, strategy={"ring_size": 2}, max_epochs=2)
        warnings.simplefilter("always")
        trainer.fit(Late(kind), DataLoader(rows(4, 16), batch_size=2))
    return [each for each in said if "shows other numbers than one device" in each]
