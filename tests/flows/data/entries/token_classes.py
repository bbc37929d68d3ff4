"""Classes of tokens: DataCollatorForTokenClassification pads labels with the texts."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from torch.utils.data import DataLoader

from tests.flows.tiny import Tuned, bert_sizes, texts, tokenizer


def main(batch_size: int, **options: Any) -> pl.LightningModule:
    from transformers import DataCollatorForTokenClassification, RobertaConfig, RobertaForTokenClassification

    words = tokenizer()
    samples = []
    for text in texts(12):
        ids = words(text)["input_ids"]
        samples.append(
            {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": [i % 5 - 1 if i % 5 else -100 for i in ids]}
        )
    loader = DataLoader(samples, batch_size=batch_size, collate_fn=DataCollatorForTokenClassification(words))
    module = Tuned(RobertaForTokenClassification(RobertaConfig(**bert_sizes(num_labels=4))))
    pl.Trainer(max_epochs=1, **options).fit(module, loader)
    return module
