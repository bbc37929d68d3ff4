"""Embeddings by mean pooling; the other rows of all groups are the negatives."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_sp.reductions import batch_mean, gather_rows, sequence_mean
from tests.flows.tiny import Tuned, bert_sizes, rows


class Module(Tuned):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        states = self.model(batch["input_ids"]).last_hidden_state
        pooled = F.normalize(sequence_mean(states), dim=-1)
        own, others = pooled[::2], gather_rows(pooled[1::2])
        similarity = 10 * own @ others.T
        rank = self.trainer.strategy.data_parallel_rank if hasattr(self.trainer.strategy, "data_parallel_rank") else 0
        loss = batch_mean(-similarity.log_softmax(-1).diagonal(rank * len(own)))
        self.log("train_loss", loss)
        return loss


def main(batch_size: int, **options: Any) -> pl.LightningModule:
    from transformers import BertConfig, BertModel

    module = Module(BertModel(BertConfig(**bert_sizes()), add_pooling_layer=False))
    pl.Trainer(max_epochs=1, **options).fit(module, DataLoader(rows(), batch_size=batch_size, drop_last=True))
    return module
