"""What the ranks of test_held_optimizers run: an optimizer around another, which a step calls by methods of its own."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from tests.trainer.tiny import Plain, TokenDataset, _full, plain_trainer, quiet_trainer, tiny_llama


class Sharpness(torch.optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.held = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.held.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        for each in self.param_groups[0]["params"]:
            self.state[each]["before"] = each.data.clone()
            each.add_(each.grad, alpha=0.05)
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for each in self.param_groups[0]["params"]:
            each.data.copy_(self.state[each]["before"])
        self.held.step()
        self.zero_grad()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise NotImplementedError


class Sharp(Plain):
    def __init__(self) -> None:
        super().__init__(partial(tiny_llama, num_layers=1))
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers().optimizer  # type: ignore[union-attr]
        for step in (optimizer.first_step, optimizer.second_step):
            self.manual_backward(F.cross_entropy(self.logits(batch).flatten(0, 1), batch["shift_labels"].flatten()))
            step()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        pass

    def configure_optimizers(self) -> Any:
        return Sharpness(self.parameters())


def fit(world: int) -> dict[str, Tensor]:
    """Return the weights behind two steps."""
    torch.manual_seed(3)
    module = Sharp()
    trainer = quiet_trainer(world) if world > 1 else plain_trainer(max_epochs=1)
    trainer.fit(module, DataLoader(TokenDataset(4), batch_size=2))
    return {name: _full(each.detach()).clone() for name, each in module.named_parameters()}
