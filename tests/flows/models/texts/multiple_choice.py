"""BERT chooses one of three answers: (rows, answers, tokens), padded"""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from tests.flows.tiny import Tuned, bert_sizes, texts, tokenizer


def main(batch_size: int, **options: object) -> pl.LightningModule:
    from transformers import BertConfig, BertForMultipleChoice

    words = tokenizer()
    found = words(texts(36), padding=True, return_tensors="pt")
    samples = [
        {
            "input_ids": found["input_ids"][3 * row : 3 * row + 3],
            "attention_mask": found["attention_mask"][3 * row : 3 * row + 3],
            "labels": torch.tensor(row % 3),
        }
        for row in range(12)
    ]
    module = Tuned(BertForMultipleChoice(BertConfig(**bert_sizes())))
    pl.Trainer(max_epochs=1, **options).fit(module, DataLoader(samples, batch_size=batch_size))
    return module
