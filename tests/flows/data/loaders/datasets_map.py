"""A map-style dataset of Hugging Face, tokenized by `map`, in the form of tensors."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from torch.utils.data import DataLoader

from tests.flows.tiny import Tuned, llama, texts, tokenizer


def main(batch_size: int, **options: Any) -> pl.LightningModule:
    import datasets

    words = tokenizer()
    corpus = datasets.Dataset.from_dict({"text": texts(12)})

    def tokenize(samples: dict[str, list[str]]) -> dict[str, Any]:
        found = words(samples["text"], padding="max_length", max_length=20, truncation=True)
        labels = [[t if t else -100 for t in row] for row in found["input_ids"]]
        return {"input_ids": found["input_ids"], "attention_mask": found["attention_mask"], "labels": labels}

    corpus = corpus.map(tokenize, batched=True, remove_columns=["text"]).with_format("torch")
    module = Tuned(llama())
    pl.Trainer(max_epochs=1, **options).fit(module, DataLoader(corpus, batch_size=batch_size))
    return module
