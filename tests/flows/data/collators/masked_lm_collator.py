"""Masked language modelling: DataCollatorForLanguageModeling draws what BERT has to guess."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from tests.flows.tiny import Tuned, bert_sizes, texts, tokenizer


def main(batch_size: int, **options: Any) -> pl.LightningModule:
    from transformers import BertConfig, BertForMaskedLM, DataCollatorForLanguageModeling

    words = tokenizer()
    samples = [words(text) for text in texts(12)]
    # Drawn once: the reference of this table draws for other batches than the ranks do.
    collate = DataCollatorForLanguageModeling(words, mlm_probability=0.4)
    torch.manual_seed(1)
    drawn = [collate([sample]) for sample in samples]

    def joined(group: list[Any]) -> Any:
        padded = words.pad([{"input_ids": s["input_ids"][0], "attention_mask": s["attention_mask"][0]} for s in group])
        labels = padded["input_ids"].new_full(padded["input_ids"].shape, -100)
        for row, one in zip(labels, group, strict=True):
            row[: one["labels"].shape[1]] = one["labels"][0]
        return {**padded, "labels": labels}

    module = Tuned(BertForMaskedLM(BertConfig(**bert_sizes())))
    loader = DataLoader(drawn, batch_size=batch_size, collate_fn=joined)
    pl.Trainer(max_epochs=1, **options).fit(module, loader)
    return module
