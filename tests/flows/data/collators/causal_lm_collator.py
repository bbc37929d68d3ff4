"""Next tokens of ragged texts: DataCollatorForLanguageModeling(mlm=False), labels where there is no padding."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from torch.utils.data import DataLoader

from tests.flows.tiny import Tuned, llama, texts, tokenizer


def main(batch_size: int, **options: Any) -> pl.LightningModule:
    from transformers import DataCollatorForLanguageModeling

    words = tokenizer()
    samples = [words(text) for text in texts(12)]
    loader = DataLoader(samples, batch_size=batch_size, collate_fn=DataCollatorForLanguageModeling(words, mlm=False))
    module = Tuned(llama())
    pl.Trainer(max_epochs=1, **options).fit(module, loader)
    return module
