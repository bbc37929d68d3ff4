"""`BaseFinetuning` thaws layers whose weights are split; resumed, it finds its parameter groups whatever wraps the modules in this run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from torch import nn

from lightning_sp.trainer.optimizers.finetuning import restore_finetuning
from tests.trainer.optimizers import finetuning_ranks as ranks


class Thaws(BaseFinetuning):
    def freeze_before_training(self, pl_module: pl.LightningModule) -> None: ...

    def finetune_function(
        self, pl_module: pl.LightningModule, epoch: int, optimizer: torch.optim.Optimizer
    ) -> None: ...


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own import
def test_groups_of_a_run_without_wrappers_are_found_below_them():
    module = pl.LightningModule()
    body, module.head = nn.Linear(3, 2), nn.Linear(2, 1)
    module.body = torch.compile(body)
    assert "body._orig_mod.weight" in dict(module.named_parameters())
    callback, optimizer = Thaws(), torch.optim.SGD(module.head.parameters(), lr=0.1)
    names = [["head.weight", "head.bias"], ["body.weight", "body.bias"]]
    callback.load_state_dict({0: [{"params": names[0], "lr": 0.1}, {"params": names[1], "lr": 0.01}]})
    restore_finetuning(cast(Any, SimpleNamespace(callbacks=[callback], optimizers=[optimizer])), module)
    first, second = optimizer.param_groups
    assert [id(each) for each in first["params"]] == [id(module.head.weight), id(module.head.bias)]
    assert [id(each) for each in second["params"]] == [id(body.weight), id(body.bias)]
    assert (first["lr"], second["lr"]) == (0.1, 0.01)


def test_a_split_layer_thaws_as_on_one_device(pools: Any):
    """Lightning asks whether weights are equal, of other shapes too, of which shards are laid out otherwise."""
    (wanted,) = pools(1).run(ranks.fit, 1, {})
    for found in pools(2).run(ranks.fit, 2, dict(tensor_parallel_size=2)):
        for name, each in wanted.items():
            assert (found[name] - each).abs().max() < 1e-10, name
