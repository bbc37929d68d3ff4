"""LoRA by peft: adapters alone are trained."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from tests.flows.tiny import Tuned, llama, rows


def main(batch_size: int, **options: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(2)
    model = get_peft_model(llama(), LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"]))
    samples = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in rows()]
    module = Tuned(model)
    pl.Trainer(max_epochs=2, **options).fit(module, DataLoader(samples, batch_size=batch_size))
    return module
