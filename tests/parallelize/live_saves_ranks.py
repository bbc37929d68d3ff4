"""What each rank runs in test_live_saves.py: a fit, behind which weights are saved as users do."""

from __future__ import annotations

import io
import warnings
from typing import Any

import torch
from torch.utils.data import DataLoader

from lightning_sp.parallelize.live_saves import _warn_of_shard
from tests.trainer.tiny import Plain, TokenDataset, quiet_trainer, tiny_llama


def save(world: int, what: str) -> list[str]:
    """Train a step and save; return what was said of it."""
    module: Any = Plain(tiny_llama)
    trainer = quiet_trainer(world, strategy=dict(ulysses_size=2, preflight=False), max_steps=1)
    trainer.fit(module, DataLoader(TokenDataset(2), batch_size=2))
    saved = {
        "state_dict": module.state_dict,
        "whole": lambda: trainer.strategy.whole_state_dict(module),  # type: ignore[attr-defined]
        "optimizer": trainer.optimizers[0].state_dict,
    }[what]()
    _warn_of_shard.cache_clear()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            torch.save(saved, io.BytesIO())
    return [str(each.message) for each in said if "sequence_parallel" in str(each.message)]
