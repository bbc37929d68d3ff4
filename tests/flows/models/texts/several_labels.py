"""BERT gives a text several classes at once: problem_type='multi_label_classification', labels of (rows, classes)"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests.flows.tiny import Tuned, bert_sizes, texts, tokenizer


class Module(Tuned):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.model(**batch).loss
        self.log("train_loss", loss, sync_dist=True)
        return loss


def main(batch_size: int, **options: Any) -> pl.LightningModule:
    from transformers import BertConfig, BertForSequenceClassification, DataCollatorWithPadding

    words = tokenizer()
    drawn = torch.randint(2, (12, 3), generator=torch.Generator().manual_seed(0)).float()
    samples = [{**words(text), "labels": classes.tolist()} for text, classes in zip(texts(12), drawn, strict=True)]
    loader = DataLoader(samples, batch_size=batch_size, collate_fn=DataCollatorWithPadding(words))
    sizes = bert_sizes(num_labels=3, problem_type="multi_label_classification")
    module = Module(BertForSequenceClassification(BertConfig(**sizes)))
    pl.Trainer(max_epochs=1, **options).fit(module, loader)
    return module
