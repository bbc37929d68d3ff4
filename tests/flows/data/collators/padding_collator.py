"""Classes of sequences: DataCollatorWithPadding and labels of rows, which have no sequence."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from torch.utils.data import DataLoader

from tests.flows.tiny import Tuned, bert_sizes, texts, tokenizer


def main(batch_size: int, **options: Any) -> pl.LightningModule:
    from transformers import BertConfig, BertForSequenceClassification, DataCollatorWithPadding

    words = tokenizer()
    samples = [{**words(text), "label": i % 3} for i, text in enumerate(texts(12))]
    loader = DataLoader(samples, batch_size=batch_size, collate_fn=DataCollatorWithPadding(words))
    module = Tuned(BertForSequenceClassification(BertConfig(**bert_sizes(num_labels=3))))
    pl.Trainer(max_epochs=1, **options).fit(module, loader)
    return module
