"""Supervised fine-tuning: prompts and answers of any length through DataCollatorForSeq2Seq."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from torch.utils.data import DataLoader

from tests.flows.tiny import Tuned, llama, texts, tokenizer


def main(batch_size: int, **options: Any) -> pl.LightningModule:
    from transformers import DataCollatorForSeq2Seq

    words = tokenizer()

    def sample(prompt: str, answer: str) -> dict[str, list[int]]:
        asked, said = words(prompt)["input_ids"], [*words(answer)["input_ids"], words.eos_token_id]
        return {
            "input_ids": asked + said,
            "attention_mask": [1] * len(asked + said),
            "labels": [-100] * len(asked) + said,
        }

    samples = [sample(*pair) for pair in zip(texts(12), texts(12, seed=1), strict=True)]
    loader = DataLoader(samples, batch_size=batch_size, collate_fn=DataCollatorForSeq2Seq(words))
    module = Tuned(llama())
    pl.Trainer(max_epochs=1, **options).fit(module, loader)
    return module
