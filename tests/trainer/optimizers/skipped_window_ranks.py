"""What runs in the ranks: windows of accumulation that end without a step, by an `optimizer_step` of one's own or in the middle."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests.trainer.tiny import Plain, TokenDataset, _full, plain_trainer, quiet_trainer, tiny_llama

BATCHES = 8


class Skips(Plain):
    def __init__(self, kind: str) -> None:
        super().__init__(tiny_llama)
        self.kind = kind

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None, **_: Any
    ) -> None:
        if self.kind == "steps nothing" and batch_idx == 3:
            optimizer_closure()
        else:
            optimizer.step(closure=optimizer_closure)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        skips = self.kind == "in the middle" and self.current_epoch == 0 and batch_idx == 3
        return -1 if skips else None


def fit(kind: str, world: int, strategy: dict[str, Any] | None) -> dict[str, Tensor]:
    """Return the weights behind two epochs."""
    torch.manual_seed(1)
    module = Skips(kind)
    options: dict[str, Any] = {"max_epochs": 2, "accumulate_grad_batches": 2}
    trainer = plain_trainer(**options) if strategy is None else quiet_trainer(world, strategy=strategy, **options)
    # Of equally many targets in each, for Lightning weighs micro-batches alike.
    rows = [each for number, each in enumerate(TokenDataset(3 * BATCHES)) if number % 3][: 2 * BATCHES]
    trainer.fit(module, DataLoader(rows, batch_size=2))
    return {name: _full(each.detach()).clone() for name, each in module.named_parameters()}
