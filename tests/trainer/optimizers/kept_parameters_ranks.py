"""What the ranks of test_kept_parameters run: a module that has made its optimizer, averages and penalty in `__init__`, of the weights there."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.trainer.tiny import Plain, TokenDataset, _full, plain_trainer, quiet_trainer, tiny_llama


class Average:
    """Averages of weights that it refers to weakly."""

    def __init__(self, weights: Iterable[nn.Parameter]) -> None:
        self.of = [ref(each) for each in weights]
        self.values = [each().detach().clone() for each in self.of]  # type: ignore[union-attr]

    @torch.no_grad()
    def update(self) -> None:
        for value, weight in zip(self.values, self.of, strict=True):
            value.lerp_(weight(), 0.5)  # type: ignore[arg-type]


def _norm(weights: list[nn.Parameter]) -> Tensor:
    return sum((each.square().sum() for each in weights), torch.zeros(()))


class Keeping(Plain):
    def __init__(self) -> None:
        super().__init__(None)
        self.model = tiny_llama().double()
        matrices = [each for each in self.model.parameters() if each.dim() > 1]
        self.average, self.penalty, self.norm = (
            Average(matrices),
            lambda: 0.01 * _norm(matrices),
            partial(_norm, matrices),
        )
        self.decayed = {id(each) for each in matrices}
        self.optimizer = torch.optim.SGD(matrices, lr=0.05, momentum=0.9)
        self.optimizer.add_param_group(dict(params=[p for p in self.model.parameters() if p.dim() < 2], lr=0.01))
        self.found: list[float] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + self.penalty()

    def on_train_batch_end(self, *_: Any) -> None:
        self.average.update()
        with torch.no_grad():
            self.found.append(float(_full(self.norm())))

    def configure_optimizers(self) -> Any:
        self.found.append(sum(id(each) in self.decayed for each in self.parameters()))
        return [self.optimizer], [torch.optim.lr_scheduler.StepLR(self.optimizer, 1)]


def fit(world: int) -> tuple[list[Tensor], list[Tensor], list[float]]:
    """Return the weights, their averages, and what was found by the weights that were kept."""
    torch.manual_seed(3)
    module = Keeping()
    trainer = quiet_trainer(world) if world > 1 else plain_trainer(max_epochs=1)
    trainer.fit(module, DataLoader(TokenDataset(6), batch_size=2))
    weights = [_full(each.detach()).clone() for each in module.parameters()]
    return weights, [_full(each) for each in module.average.values], module.found
