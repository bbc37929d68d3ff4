"""TRL's collator for supervised fine-tuning, with a mask of what is completed."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from torch.utils.data import DataLoader

from tests.flows.tiny import Tuned, llama, texts, tokenizer


def main(batch_size: int, **options: Any) -> pl.LightningModule:
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    words = tokenizer()
    samples = []
    for text in texts(12):
        ids = words(text)["input_ids"]
        samples.append({"input_ids": ids, "completion_mask": [int(i >= len(ids) // 3) for i in range(len(ids))]})
    loader = DataLoader(samples, batch_size=batch_size, collate_fn=DataCollatorForLanguageModeling(pad_token_id=0))
    module = Tuned(llama())
    pl.Trainer(max_epochs=1, **options).fit(module, loader)
    return module
