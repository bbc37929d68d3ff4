"""What each rank runs in test_own_optimizers.py: modules that step an optimizer of their own within a step of automatic optimization."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_sp.errors import SequenceParallelError
from tests.trainer.tiny import VOCAB, Plain, TokenDataset, _full, plain_trainer, quiet_trainer, tiny_llama


class Probing(Plain):
    """Trains a probe beside the model, whose loss it scales by the probe's."""

    def __init__(self, made: str) -> None:
        super().__init__(tiny_llama)
        self.made, self.own, self.momentum = made, None, {}
        self.seen: list[float] = []

    def configure_model(self) -> None:
        if self.model is None:
            super().configure_model()
            self.probe = nn.Linear(VOCAB, 1)

    def configure_optimizers(self) -> Any:
        if self.made == "before":
            self.own = torch.optim.Adam(self.probe.parameters(), lr=0.05)
        return torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits = self.logits(batch)
        weights = list(self.probe.parameters())
        if self.own is None:
            self.own = torch.optim.Adam(weights, lr=0.05)
        probed = (self.probe(logits.detach().mean(1)) - 1).square().mean()
        for each, gradient in zip(weights, torch.autograd.grad(probed, weights), strict=True):
            each.grad = gradient
            self.momentum[each] = gradient.mean() + self.momentum.get(each, 0.0)
        self.own.step()
        self.own.zero_grad()
        self.seen.append(float(probed.detach()))
        loss = F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten())
        return loss * (1 + probed.detach())


def fit(made: str, world: int, strategy: dict[str, Any] | None) -> dict[str, Any]:
    """Fit with an own optimizer that is made "before" the steps, or "within" the first."""
    torch.manual_seed(0)
    module = Probing(made)
    trainer = quiet_trainer(world, strategy=strategy, max_epochs=2) if strategy else plain_trainer(max_epochs=2)
    said = ""
    try:
        trainer.fit(module, DataLoader(TokenDataset(6), batch_size=2))
    except SequenceParallelError as error:
        said = str(error)
    weights = {name: _full(each.detach()).clone() for name, each in module.named_parameters()}
    return {"said": said, "seen": module.seen, "weights": weights}
