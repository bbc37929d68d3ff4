"""What each rank runs in test_testing.py: importable by name in the ranks' processes."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist

from lightning_sp.testing import RankPool


def late(failing: int, seconds: float) -> str:
    if dist.get_rank() == failing:
        raise ValueError("boom")
    time.sleep(seconds)
    return "late"


def leave(leaving: tuple[int, ...]) -> str:
    """End some ranks as a crash would; the others answer."""
    if dist.get_rank() in leaving:
        os._exit(7)
    return "here"


def rank_of() -> int:
    return dist.get_rank()


def seed_once() -> str | None:
    """Return what an earlier call has set, and set it."""
    before = os.environ.get("PL_GLOBAL_SEED")
    os.environ["PL_GLOBAL_SEED"] = "7"
    return before


def hanging_ranks(tell) -> None:
    """Start ranks that never answer, after telling the numbers of their processes and of the server that started them."""
    with RankPool(3, timeout_s=60) as pool:
        tell(*pool.run(processes_of))
        pool.run(hang)


def processes_of() -> str:
    return f"{os.getpid()} {os.getppid()}"


def hang() -> None:
    """Sleep in the user's code, compute, or wait for another rank."""
    if dist.get_rank() == 0:
        dist.recv(torch.empty(1), 1)
    while dist.get_rank() == 1:
        pass
    time.sleep(600)


class Tell:
    """`print` into a queue."""

    def __init__(self, queue) -> None:
        self.queue = queue

    def __call__(self, *lines: str) -> None:
        self.queue.put(lines)
