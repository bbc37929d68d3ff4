"""Prompt tuning by peft: trained vectors before the sequence, with ragged rows."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from tests.flows.tiny import Tuned, llama, rows, tokenizer


def main(batch_size: int, **options: Any) -> Any:
    from peft import PromptTuningConfig, get_peft_model
    from transformers import DataCollatorForSeq2Seq

    torch.manual_seed(2)
    model = get_peft_model(llama(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5))
    ids = [row["input_ids"][: 7 + i].tolist() for i, row in enumerate(rows())]
    samples = [{"input_ids": each, "attention_mask": [1] * len(each), "labels": each} for each in ids]
    module = Tuned(model)
    loader = DataLoader(samples, batch_size=batch_size, collate_fn=DataCollatorForSeq2Seq(tokenizer()))
    pl.Trainer(max_epochs=2, **options).fit(module, loader)
    return module
