"""A callback reads what steps return, with their batch, at the end of each: accuracies in training and validation"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch.nn.functional as F
from torch.utils.data import DataLoader

from tests.flows.tiny import Tuned, llama, rows

LAYOUTS = ["ulysses 2", "ring 2"]


class Accuracy(pl.Callback):
    def __init__(self) -> None:
        self.found: dict[str, list[float]] = {"train": [], "val": []}

    def read(self, kind: str, outputs: Any, batch: Any) -> None:
        right = outputs["logits"].argmax(-1) == batch["shift_labels"]
        self.found[kind].append(float(right.float().mean() + outputs["logits"].square().mean()))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.read("train", outputs, batch)

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.read("val", outputs, batch)
        self.log("accuracy", self.found["val"][-1], on_epoch=True, batch_size=len(batch["input_ids"]))


class Module(Tuned):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.model(input_ids=batch["input_ids"]).logits
        return {"loss": F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten()), "logits": logits}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.training_step(batch, batch_idx)


def main(batch_size: int, **options: Any) -> Any:
    module, accuracy = Module(llama()), Accuracy()
    loader = DataLoader(rows(length=17), batch_size=batch_size)
    pl.Trainer(max_epochs=1, callbacks=[accuracy], **options).fit(module, loader, loader)
    return module, {f"{kind} {i}": each for kind, values in accuracy.found.items() for i, each in enumerate(values)}
