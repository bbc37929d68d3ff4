"""Gemma 3's text model: windows and whole layers in turn."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from torch.utils.data import DataLoader

from tests.flows.tiny import Tuned, rows, sizes


def main(batch_size: int, **options: Any) -> Any:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    samples = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for i, row in enumerate(rows())]
    module = Tuned(Gemma3ForCausalLM(Gemma3TextConfig(**sizes(head_dim=8, sliding_window=5))))
    pl.Trainer(max_epochs=1, **options).fit(module, DataLoader(samples, batch_size=batch_size))
    return module
