"""Lightning's `grad_norm` of the model, logged before each optimizer step."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import grad_norm
from torch.utils.data import DataLoader

from tests.flows.tiny import Tuned, llama, rows


class Module(Tuned):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self.model, norm_type=2))


def main(batch_size: int, **options: Any) -> Any:
    samples = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in rows()]
    module = Module(llama())
    pl.Trainer(max_epochs=1, **options).fit(module, DataLoader(samples, batch_size=batch_size))
    return module
