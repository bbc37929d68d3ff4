"""Gradient accumulation over micro-batches, clipping by norm."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from torch.utils.data import DataLoader

from tests.flows.tiny import Tuned, llama, texts, tokenizer


def main(batch_size: int, **options: Any) -> pl.LightningModule:
    from transformers import DataCollatorForLanguageModeling

    words = tokenizer()
    collate = DataCollatorForLanguageModeling(words, mlm=False)
    loader = DataLoader([words(text) for text in texts(24, 16, 16)], batch_size=batch_size, collate_fn=collate)
    module = Tuned(llama())
    pl.Trainer(max_epochs=1, accumulate_grad_batches=2, gradient_clip_val=0.5, **options).fit(module, loader)
    return module
