"""A learning rate that grows with the tokens that were seen, a share of right ones kept for the epoch's end, and a callback's hook on a layer"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from tests.flows.tiny import Tuned, llama, rows

# Each data-parallel group sees its own rows.
LAYOUTS = ["ulysses 2", "ring 2"]


class Activations(pl.Callback):
    def __init__(self) -> None:
        self.largest: list[float] = []

    def on_fit_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        pl_module.model.model.layers[0].mlp.register_forward_hook(
            lambda _, __, output: self.largest.append(output.detach().abs().mean().item())
        )


class Module(Tuned):
    def __init__(self) -> None:
        super().__init__(llama())
        self.seen, self.right = 0, list[float]()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen += batch["input_ids"].numel()
        self.optimizers().param_groups[0]["lr"] = 0.1 * min(1.0, self.seen / 200)  # type: ignore[union-attr]
        logits = self.model(batch["input_ids"]).logits
        self.right.append((logits.argmax(-1) % 7 == batch["shift_labels"] % 7).double().mean().item())
        return F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten())

    def on_train_epoch_end(self) -> None:
        self.log("right", sum(self.right) / len(self.right))


def main(batch_size: int, **options: Any) -> Any:
    module, activations = Module(), Activations()
    trainer = pl.Trainer(max_epochs=1, callbacks=[activations], **options)
    trainer.fit(module, DataLoader(rows(length=16), batch_size=batch_size))
    return module, {f"activation {i}": value for i, value in enumerate(activations.largest)}
