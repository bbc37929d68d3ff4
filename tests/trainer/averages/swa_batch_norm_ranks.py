"""What runs in the ranks: Lightning's StochasticWeightAveraging of a model with a batch norm, whose further epoch has no backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from tests.flows.tiny import VOCABULARY, Tuned, llama, rows
from tests.trainer.tiny import quiet_trainer
from tools.models.ranks import weights_of


class Normed(Tuned):
    """Its head and its norm are direct children of the module: they belong to no block."""

    def __init__(self) -> None:
        super().__init__(llama(num_hidden_layers=1).model)
        self.norm, self.head = nn.BatchNorm1d(32), nn.Linear(32, VOCABULARY)
        self.are_shards: list[bool] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        states = self.model(batch["input_ids"]).last_hidden_state
        logits = self.head(states + self.norm(states[:, 0])[:, None])
        return F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten())

    def on_train_batch_end(self, *_: Any) -> None:
        self.are_shards.append(isinstance(self.head.weight, DTensor))


def fit(world: int) -> tuple[dict[str, Tensor], list[bool]]:
    """Return the weights at the end, what the batch norm has counted, and whether each step has left shards behind."""
    torch.manual_seed(3)
    module = Normed()
    average = StochasticWeightAveraging(0.02, swa_epoch_start=1, annealing_epochs=1)
    strategy = {"ring_size": world, "global_view": "auto"}
    trainer = quiet_trainer(world, strategy=strategy, max_epochs=3, callbacks=[average])
    trainer.fit(module, DataLoader(rows(12, 16), batch_size=4))
    assert isinstance(module.norm.running_mean, Tensor)
    return {**weights_of(module), "mean": module.norm.running_mean.clone()}, module.are_shards
