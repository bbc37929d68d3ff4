"""Multitask prompt tuning by peft: each row's virtual tokens are those of its task."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from tests.flows.tiny import Tuned, llama, rows, tokenizer


def main(batch_size: int, **options: Any) -> Any:
    from peft import MultitaskPromptTuningConfig, get_peft_model
    from transformers import DataCollatorForSeq2Seq

    torch.manual_seed(2)
    config = MultitaskPromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5, num_tasks=3)
    model = get_peft_model(llama(), config)
    ids = [row["input_ids"][: 7 + i].tolist() for i, row in enumerate(rows())]
    samples = [
        {"input_ids": each, "attention_mask": [1] * len(each), "labels": each, "task_ids": i % 3}
        for i, each in enumerate(ids)
    ]
    module = Tuned(model)
    loader = DataLoader(samples, batch_size=batch_size, collate_fn=DataCollatorForSeq2Seq(tokenizer()))
    pl.Trainer(max_epochs=2, **options).fit(module, loader)
    return module
