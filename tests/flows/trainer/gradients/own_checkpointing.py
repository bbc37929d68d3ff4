"""The model's own gradient checkpointing."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from torch.utils.data import DataLoader

from tests.flows.tiny import Tuned, llama, rows


def main(batch_size: int, **options: Any) -> Any:
    model = llama()
    model.gradient_checkpointing_enable()
    samples = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in rows()]
    module = Tuned(model)
    pl.Trainer(max_epochs=1, **options).fit(module, DataLoader(samples, batch_size=batch_size))
    return module
