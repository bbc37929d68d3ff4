"""Batches that are tuples: (tokens, targets), as in PyTorch's own tutorials."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from tests.flows.tiny import VOCABULARY, Tuned, llama


class Module(Tuned):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, targets = batch
        logits = self.model(tokens).logits
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
        self.log("train_loss", loss)
        return loss


def main(batch_size: int, **options: Any) -> pl.LightningModule:
    tokens = torch.randint(6, VOCABULARY, (12, 17), generator=torch.Generator().manual_seed(0))
    rows = TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    module = Module(llama())
    pl.Trainer(max_epochs=1, **options).fit(module, DataLoader(rows, batch_size=batch_size))
    return module
