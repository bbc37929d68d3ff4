"""A streamed dataset of Hugging Face: an IterableDataset that nobody has split."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from torch.utils.data import DataLoader

from tests.flows.tiny import Tuned, llama, texts, tokenizer


def main(batch_size: int, **options: Any) -> pl.LightningModule:
    import datasets

    words = tokenizer()

    def read() -> Any:
        for text in texts(12):
            found = words(text, padding="max_length", max_length=20, truncation=True)
            yield {"input_ids": found["input_ids"], "labels": [t if t else -100 for t in found["input_ids"]]}

    corpus = datasets.IterableDataset.from_generator(read).with_format("torch")
    module = Tuned(llama())
    pl.Trainer(max_epochs=1, **options).fit(module, DataLoader(corpus, batch_size=batch_size))
    return module
