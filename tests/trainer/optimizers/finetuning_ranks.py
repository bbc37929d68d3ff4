"""What each rank runs in test_finetuning.py: a fit whose first layer thaws in the second epoch."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from torch.utils.data import DataLoader

from tests.trainer.tiny import Plain, TokenDataset, plain_trainer, quiet_trainer, tiny_llama


class Thaw(BaseFinetuning):
    def freeze_before_training(self, pl_module: pl.LightningModule) -> None:
        pl_module.configure_model()
        self.freeze(pl_module.model.layers[0])

    def finetune_function(self, pl_module: pl.LightningModule, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.model.layers[0], optimizer, lr=0.01)


def fit(world: int, strategy: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the weights of three epochs."""
    torch.manual_seed(0)
    module = Plain(tiny_llama)
    options: dict[str, Any] = {"max_epochs": 3, "callbacks": [Thaw()]}
    trainer = quiet_trainer(world, strategy=strategy, **options) if world > 1 else plain_trainer(**options)
    trainer.fit(module, DataLoader(TokenDataset(4), batch_size=2))
    return {
        name: each.full_tensor() if hasattr(each, "full_tensor") else each for name, each in module.state_dict().items()
    }
