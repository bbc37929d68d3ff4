"""What each rank runs in test_coming_together.py: calls of all ranks, and where the package makes them."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as _c10d
from torch.utils.data import DataLoader

from lightning_sp import comm
from lightning_sp.comm import coming_together
from tests.trainer.tiny import Plain, TokenDataset, quiet_trainer, tiny_llama


def meet() -> tuple[float, list[bool]]:
    """Come three times, the last rank late; return how long this one has waited, and which entries are left in the store."""
    first, waited = next(coming_together._numbers) + 1, 0.0
    for _ in range(3):
        if dist.get_rank() == dist.get_world_size() - 1:
            time.sleep(0.1)
        began = time.perf_counter()
        comm.come_together()
        waited += time.perf_counter() - began
    store = _c10d._get_default_store()
    dist.barrier()
    return waited, [store.check([f"lightning_sp/together/{first + each}"]) for each in range(3)]


class Skips(Plain):
    """Leaves the rest of an epoch out."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 1 else None


def places(path: str) -> dict[str, int]:
    """Return how often ranks come together in a fit whose second batch is skipped, a save, and a gather of the weights."""
    counted = 0
    own = comm.come_together

    def counts() -> None:
        nonlocal counted
        counted += 1
        own()

    found: dict[str, int] = {}

    def note(name: str) -> None:
        found[name] = counted - sum(found.values())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comm, "come_together", counts)
        torch.manual_seed(0)
        trainer = quiet_trainer(2, strategy={"preflight": False})
        trainer.fit(Skips(tiny_llama), DataLoader(TokenDataset(8), batch_size=2))
        note("skips")
        trainer.save_checkpoint(path)
        note("saves")
        trainer.strategy.whole_state_dict()  # type: ignore[attr-defined]
        note("gathers")
    return {**found, "steps": trainer.global_step}
