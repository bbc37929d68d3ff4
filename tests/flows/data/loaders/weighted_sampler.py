"""WeightedRandomSampler: rare samples are drawn more often."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, WeightedRandomSampler

from tests.flows.tiny import Tuned, llama, texts, tokenizer


def main(batch_size: int, **options: Any) -> pl.LightningModule:
    from transformers import DataCollatorForLanguageModeling

    words = tokenizer()
    samples = [words(text) for text in texts(12)]
    generator = torch.Generator().manual_seed(7)
    sampler = WeightedRandomSampler([1.0 + i % 3 for i in range(12)], 12, generator=generator)
    collate = DataCollatorForLanguageModeling(words, mlm=False)
    module = Tuned(llama())
    loader = DataLoader(samples, batch_size=batch_size, sampler=sampler, collate_fn=collate)
    pl.Trainer(max_epochs=1, **options).fit(module, loader)
    return module
