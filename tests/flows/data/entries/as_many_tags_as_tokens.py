"""Tags of a row, which are no sequence, as many as the second batch has tokens."""

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
        super().__init__(llama())
        self.tags = nn.Embedding(30, 32)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tags = self.tags(batch["tags"]).mean(1, keepdim=True)
        embedded = self.model.get_input_embeddings()(batch["input_ids"]) + tags
        logits = self.model(inputs_embeds=embedded).logits
        return F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten())


def main(batch_size: int, **options: Any) -> Any:
    torch.manual_seed(5)
    found = [{**row, "tags": torch.randint(30, (16,))} for row in [*rows(4, 20), *rows(8, 16)]]
    module = Module()
    pl.Trainer(max_epochs=1, **options).fit(module, DataLoader(found, batch_size=batch_size))  # type: ignore[arg-type]
    return module
