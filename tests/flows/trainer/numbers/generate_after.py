"""`model.generate` on whole prompts after the fit."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from torch.utils.data import DataLoader

from tests.flows.tiny import Tuned, llama, rows


def main(batch_size: int, **options: Any) -> Any:
    samples = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in rows()]
    module = Tuned(llama())
    pl.Trainer(max_epochs=1, **options).fit(module, DataLoader(samples, batch_size=batch_size))
    prompt = rows(2)[0]["input_ids"][None, :6]
    written = module.model.generate(prompt, max_new_tokens=5, do_sample=False)
    return module, {"written": written}
