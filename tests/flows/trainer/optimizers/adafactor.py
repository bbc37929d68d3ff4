"""Hugging Face's Adafactor with its own schedule, which looks at rows and columns of whole weights; clipped and accumulated"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from torch.utils.data import DataLoader
from transformers.optimization import Adafactor, AdafactorSchedule

from tests.flows.tiny import Tuned, llama, rows


class Module(Tuned):
    def configure_optimizers(self) -> Any:
        optimizer = Adafactor(self.parameters(), scale_parameter=True, relative_step=True, warmup_init=True, lr=None)
        return [optimizer], [{"scheduler": AdafactorSchedule(optimizer), "interval": "step"}]


def main(batch_size: int, **options: Any) -> Any:
    samples = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in rows()]
    module = Module(llama())
    trainer = pl.Trainer(max_epochs=1, accumulate_grad_batches=2, gradient_clip_val=0.5, **options)
    trainer.fit(module, DataLoader(samples, batch_size=batch_size))
    return module, {}
