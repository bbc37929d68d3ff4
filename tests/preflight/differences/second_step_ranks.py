"""What runs in the ranks: a step that keeps each batch's predictions, and holds the next epoch's against them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from tests.trainer.tiny import Plain, TokenDataset, _full, quiet_trainer, tiny_llama


class Keeping(Plain):
    def __init__(self, weight: float) -> None:
        super().__init__(tiny_llama)
        self.weight, self.kept = weight, dict[int, Tensor]()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits = self.logits(batch)
        loss = F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten())
        if batch_idx in self.kept and self.weight:
            loss = loss + self.weight * (logits.softmax(-1) - self.kept[batch_idx]).square().mean()
        self.kept[batch_idx] = logits.detach().softmax(-1)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def fit(world: int, weight: float) -> dict[str, Any]:
    """Return the weights of two epochs, and whether the step ended in the global view."""
    torch.manual_seed(3)
    module = Keeping(weight)
    trainer = quiet_trainer(world, strategy={"ring_size": 2, "global_view": "auto"} if world > 1 else {}, max_epochs=2)
    trainer.fit(module, DataLoader(TokenDataset(4), batch_size=2))
    weights = {name: _full(each.detach()).clone() for name, each in module.named_parameters()}
    return {"weights": weights, "whole": getattr(trainer.strategy, "sees_whole_sequences", None)}
