"""A fit on each rank, and what is left of its model when nobody holds it any more."""

from __future__ import annotations

import gc
import os
import weakref
from typing import Any

from torch.utils.data import DataLoader

from tests.trainer.tiny import HuggingFaceLlama, Plain, TokenDataset, quiet_trainer


def is_left(strategy: dict[str, Any]) -> list[str]:
    """Return which of a trainer, its module and its strategy are there behind a fit, with no name for them."""
    found = _refs(strategy)
    gc.collect()
    return [name for name, ref in found.items() if ref() is not None]


def _refs(strategy: dict[str, Any]) -> dict[str, weakref.ref[Any]]:
    trainer = quiet_trainer(int(os.environ["WORLD_SIZE"]), strategy=strategy, max_steps=2)
    module = Plain(HuggingFaceLlama)
    trainer.fit(module, DataLoader(TokenDataset(size=8), batch_size=1))
    return {"trainer": weakref.ref(trainer), "module": weakref.ref(module), "strategy": weakref.ref(trainer.strategy)}
