"""This project through the Trainer: the batch and the loss as one device has them, parameters sharded. Without the preflight, which has a figure
of its own.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.autosp.models import LEARNING_RATE, batch_of, loss_of, made
from benchmarks.autosp.rank import Meter, compared
from lightning_sp import SequenceParallelStrategy


class _Module(pl.LightningModule):
    def __init__(self, name: str, given: dict[str, Any], meter: Meter) -> None:
        super().__init__()
        self.name, self.given, self.meter = name, given, meter
        self.error = 0.0
        self.model = made(name, given["size"])

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return loss_of(self.model, self.name, batch)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.meter.begin()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.meter.end(float(outputs["loss"]))
        if batch_idx == 0:
            whole = {name: _whole(each.detach()) for name, each in self.model.named_parameters()}
            self.error = compared(
                {name.replace("_orig_mod.", ""): each for name, each in whole.items()}, self.given["reference"]
            )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=LEARNING_RATE)


def _whole(tensor: Any) -> Tensor:
    found: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found


def train(name: str, given: dict[str, Any], meter: Meter) -> dict[str, float]:
    """Fit one epoch of the batches."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    rows = [
        {key: value[0] for key, value in batch_of(name, length, number).items()}
        for number, length in enumerate(given["lengths"])
    ]
    module = _Module(name, given, meter)
    trainer = pl.Trainer(
        strategy=SequenceParallelStrategy(**{"preflight": False, **given["options"]}), accelerator="cpu", devices=dist.get_world_size(),
        max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(rows, batch_size=1))  # type: ignore[arg-type]
    return {"error": module.error}
