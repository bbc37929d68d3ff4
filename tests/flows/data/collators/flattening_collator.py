"""Packed documents without padding: DataCollatorWithFlattening, whose positions restart with each."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from torch.utils.data import DataLoader

from tests.flows.tiny import Tuned, llama, texts, tokenizer


def main(batch_size: int, **options: Any) -> pl.LightningModule:
    from transformers import DataCollatorWithFlattening

    words = tokenizer()
    samples = [{"input_ids": words(text)["input_ids"]} for text in texts(12)]
    loader = DataLoader(samples, batch_size=batch_size, collate_fn=DataCollatorWithFlattening())
    module = Tuned(llama(use_cache=False))
    pl.Trainer(max_epochs=1, **options).fit(module, loader)
    return module
