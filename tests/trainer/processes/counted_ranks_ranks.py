"""What each rank runs in test_counted_ranks.py: a schedule that is made of a number of ranks."""

from __future__ import annotations

import warnings
from typing import Any

from torch.utils.data import DataLoader

from tests.trainer.tiny import Plain, TokenDataset, quiet_trainer, tiny_gpt


class Schedule(Plain):
    """Asks for numbers of ranks as schedules of tutorials do."""

    def configure_optimizers(self) -> Any:
        trainer = self.trainer
        self.found = []
        for _ in range(2):
            self.found += [8 // (2 * trainer.num_devices)]
            self.found += [8 // (2 * trainer.world_size)]
        self.found += [trainer.world_size > 1]
        return super().configure_optimizers()


def fit(world: int, strategy: dict[str, Any]) -> tuple[list[int], list[str]]:
    """Return what a module has made of numbers of ranks, and what was said of them."""
    module = Schedule(tiny_gpt)
    trainer = quiet_trainer(world, strategy={"preflight": False, **strategy}, limit_train_batches=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, DataLoader(TokenDataset(4), batch_size=2))
    return module.found, [str(each.message) for each in caught if "a number of ranks" in str(each.message)]
