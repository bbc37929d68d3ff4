"""A BasePredictionWriter writes each batch's predictions beside its tokens, on rank 0 alone; the files are read again"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor
from torch.utils.data import DataLoader

from tests.flows.tiny import Tuned, llama, rows

LAYOUTS = ["ulysses 2", "ring 2"]


class Module(Tuned):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(
            input_ids=batch["input_ids"], shift_labels=batch["shift_labels"], labels=batch["shift_labels"]
        ).loss

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(batch["input_ids"]).logits.argmax(-1)


class Writer(BasePredictionWriter):
    def __init__(self, folder: Path) -> None:
        super().__init__("batch")
        self.folder = folder

    def write_on_batch_end(
        self,
        trainer: pl.Trainer,
        module: Any,
        found: Tensor,
        places: Sequence[int] | None,
        batch: Any,
        number: int,
        _: int,
    ) -> None:
        if trainer.is_global_zero:
            self.folder.mkdir(exist_ok=True)
            torch.save({"found": found, "tokens": batch["input_ids"]}, self.folder / f"{number}.pt")


def main(batch_size: int, **options: Any) -> Any:
    folder = Path(options["default_root_dir"]) / f"written by {options['devices']}"
    module = Module(llama())
    trainer = pl.Trainer(max_epochs=1, callbacks=[Writer(folder)], **options)
    trainer.fit(module, DataLoader(rows(), batch_size=batch_size))
    trainer.predict(module, DataLoader(rows(6), batch_size=batch_size))
    trainer.strategy.barrier()
    written = [torch.load(folder / f"{number}.pt") for number in range(2)]
    return module, {f"{name} {i}": each[name] for i, each in enumerate(written) for name in each}
