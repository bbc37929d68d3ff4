"""A batch sampler of the user's own: rows of about one length together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
from torch.utils.data import DataLoader, Sampler

from tests.flows.tiny import Tuned, llama, texts, tokenizer


class Buckets(Sampler[list[int]]):
    """Batches of neighbours by length."""

    def __init__(self, lengths: list[int], batch_size: int) -> None:
        order = sorted(range(len(lengths)), key=lambda i: lengths[i])
        self.batches = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def main(batch_size: int, **options: Any) -> pl.LightningModule:
    from transformers import DataCollatorForLanguageModeling

    words = tokenizer()
    samples = [words(text) for text in texts(12)]
    buckets = Buckets([len(sample["input_ids"]) for sample in samples], batch_size)
    collate = DataCollatorForLanguageModeling(words, mlm=False)
    module = Tuned(llama())
    pl.Trainer(max_epochs=1, **options).fit(module, DataLoader(samples, batch_sampler=buckets, collate_fn=collate))
    return module
