"""What `test_backend` runs on real ranks: a fit by a backend that this process has registered."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lightning_sp import comm
from lightning_sp.testing import free_port
from tests.trainer.tiny import fit


def fit_by(backend: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return a fit in a world that the strategy makes by a backend, with the world's name and how many groups the backend made."""
    made: list[int] = []

    def create(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        # Gloo under another name, as a vendor's library registers its own.
        made.append(size)
        return dist.ProcessGroupGloo(store, rank, size, timeout)

    dist.Backend.register_backend(backend, create, devices=["cpu"])
    port = comm.broadcast_object(free_port(), None)
    dist.destroy_process_group()
    os.environ["MASTER_PORT"] = str(port)
    answer = fit("llama", int(os.environ["WORLD_SIZE"]), {**options, "process_group_backend": backend}, {"size": 4})
    return {**answer, "backend": dist.get_backend(), "made": len(made)}
