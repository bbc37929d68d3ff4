"""TRL's padding-free batches: samples one after the other, positions that restart."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from torch.utils.data import DataLoader

from tests.flows.tiny import Tuned, llama, texts, tokenizer


def main(batch_size: int, **options: Any) -> pl.LightningModule:
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    words = tokenizer()
    samples = [{"input_ids": words(text)["input_ids"]} for text in texts(12)]
    collator = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    loader = DataLoader(samples, batch_size=batch_size, collate_fn=collator)
    module = Tuned(llama(use_cache=False))
    pl.Trainer(max_epochs=1, **options).fit(module, loader)
    return module
