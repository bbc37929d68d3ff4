"""What each rank runs in test_out_of_memory.py: fits that ask for more memory than there is."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.utilities.memory import is_oom_error
from torch.utils.data import DataLoader

from tests.trainer.tiny import Plain, TokenDataset, quiet_trainer, tiny_llama


class Asking(Plain):
    """Asks for a petabyte in the second step, or raises another error."""

    error = "memory"

    def on_before_zero_grad(self, optimizer: Any) -> None:
        if self.global_step >= 1 and self.error == "memory":
            torch.empty(2**50, dtype=torch.uint8)
        if self.global_step >= 1:
            raise RuntimeError(ValueError("something else"))


def fit(error: str, world: int, strategy: dict[str, Any]) -> dict[str, Any]:
    """Return what a fit said when it failed."""
    torch.manual_seed(0)
    module = Asking(tiny_llama)
    module.error = error
    trainer = quiet_trainer(world, strategy=strategy, precision="32-true", max_steps=2)
    try:
        trainer.fit(module, DataLoader(TokenDataset(8), batch_size=2))
    except RuntimeError as found:
        return {"kind": type(found).__name__, "said": str(found), "is_oom": error == "memory" and is_oom_error(found)}
    return {"kind": ""}
