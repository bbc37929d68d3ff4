"""A loss on the hidden states of a layer in the middle: output_hidden_states=True."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_sp.reductions import batch_mean
from tests.flows.tiny import Tuned, llama, rows


class Module(Tuned):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        found = self.model(batch["input_ids"], output_hidden_states=True)
        loss = F.cross_entropy(found.logits.flatten(0, 1), batch["shift_labels"].flatten())
        loss = loss + batch_mean(found.hidden_states[2].square().mean(-1))
        self.log("train_loss", loss)
        return loss


def main(batch_size: int, **options: Any) -> pl.LightningModule:
    module = Module(llama(num_hidden_layers=3))
    pl.Trainer(max_epochs=1, **options).fit(module, DataLoader(rows(), batch_size=batch_size))
    return module
