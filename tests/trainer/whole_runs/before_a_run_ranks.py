"""What each rank runs in test_before_a_run.py: a fit of a Trainer that was asked for its steps before."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader

from tests.trainer.tiny import Plain, TokenDataset, quiet_trainer, tiny_llama


def fit(world: int, asks: bool) -> dict[str, Any]:
    """Train an epoch of a shuffled loader; return how many steps were foretold, and the losses."""
    torch.manual_seed(3)
    module = Plain(tiny_llama)
    trainer = quiet_trainer(world, strategy={"data_parallel_size": 2, "preflight": False})
    loader = DataLoader(TokenDataset(8), batch_size=2, shuffle=True)
    foretold = 0
    if asks:
        trainer.strategy.connect(module)
        module.trainer = trainer
        trainer._data_connector.attach_data(module, train_dataloaders=loader)
        foretold = int(trainer.estimated_stepping_batches)
    torch.manual_seed(4)  # to ask draws a number, as on one device
    trainer.fit(module, loader)
    return {"foretold": foretold, "steps": trainer.global_step, "losses": module.losses}
