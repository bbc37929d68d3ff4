"""Embeddings made by the step: `get_input_embeddings()(ids)`, then inputs_embeds."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from tests.flows.tiny import Tuned, llama, rows


class Module(Tuned):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        embeds = self.model.get_input_embeddings()(batch["input_ids"])
        logits = self.model(inputs_embeds=embeds * 1.5).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten())
        self.log("train_loss", loss)
        return loss


def main(batch_size: int, **options: Any) -> Any:
    module = Module(llama())
    pl.Trainer(max_epochs=1, **options).fit(module, DataLoader(rows(), batch_size=batch_size))
    return module
