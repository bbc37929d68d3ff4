"""What the ranks of test_later_logits run: manual optimization whose logits are read behind backwards and optimizers' steps."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from tests.trainer.tiny import TokenDataset, _full, plain_trainer, quiet_trainer, tiny_llama

SUM: dict[str, Any] = dict(reduce_fx="sum", sync_dist=True, on_step=False, on_epoch=True)


class Adversaries(pl.LightningModule):
    """The second learns from the first, and the first learns by logits of before the second's step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.first, self.second = tiny_llama(), tiny_llama()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        of_first, of_second = self.optimizers()
        positions, targets = batch["position_ids"], batch["shift_labels"]
        logits = self.first(batch["input_ids"], positions)
        answers = self.second(logits.detach().argmax(-1), positions)
        self._learn(of_second, F.cross_entropy(answers.flatten(0, 1), targets.flatten()))
        self._learn(of_first, F.cross_entropy(logits.flatten(0, 1), targets.flatten()))
        self.log("right", ((answers.argmax(-1) == targets) & (targets != -100)).sum().double(), **SUM)
        with torch.no_grad():
            loss = F.cross_entropy(logits.flatten(0, 1) / 2, targets.flatten())
        self.log("loss", loss, on_step=False, on_epoch=True)

    def _learn(self, optimizer: Any, loss: Tensor) -> None:
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(each.parameters(), lr=0.3) for each in (self.first, self.second)]


def fit(world: int, strategy: dict[str, Any] | None) -> dict[str, Tensor]:
    """Return the weights, and what was logged."""
    torch.manual_seed(3)
    module = Adversaries()
    trainer = plain_trainer(max_epochs=1) if strategy is None else quiet_trainer(world, strategy=strategy)
    trainer.fit(module, DataLoader(TokenDataset(4), batch_size=2))
    logged = {name: torch.as_tensor(trainer.callback_metrics[name]) for name in ("right", "loss")}
    return {**logged, **{name: _full(each.detach()).clone() for name, each in module.named_parameters()}}
