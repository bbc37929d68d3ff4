"""P-tuning by peft: a network makes the vectors before the sequence, and is validated."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from tests.flows.tiny import Tuned, llama, rows


class Module(Tuned):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.model(**batch).loss, sync_dist=True)


def main(batch_size: int, **options: Any) -> Any:
    from peft import PromptEncoderConfig, get_peft_model

    torch.manual_seed(2)
    config = PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=4, encoder_hidden_size=16)
    samples = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in rows()]
    module = Module(get_peft_model(llama(), config))
    loader = DataLoader(samples, batch_size=batch_size)
    pl.Trainer(max_epochs=2, **options).fit(module, loader, loader)
    return module
