"""The ranks that all distributed tests run on: what one call leaves behind is not the next one's answer."""

from __future__ import annotations

import os
import signal
import time
from threading import Timer

import pytest

from lightning_sp import testing
from lightning_sp.testing import RankPool


def late(failing: int, seconds: float) -> str:
    import torch.distributed as dist

    if dist.get_rank() == failing:
        raise ValueError("boom")
    time.sleep(seconds)
    return "late"


def rank_of() -> int:
    import torch.distributed as dist

    return dist.get_rank()


def test_a_call_that_failed_ends_the_pool(monkeypatch):
    monkeypatch.setattr(testing, "_OTHERS_S", 0.5)
    with RankPool(2) as pool:
        assert pool.run(rank_of) == [0, 1]
        with pytest.raises(
            RuntimeError,
            match=r"rank 1 of 2 failed first(.|\n)*ValueError: boom(.|\n)*no answer from ranks \[0\] within",
        ):
            pool.run(late, 1, 2.0)
        # Rank 0 would answer now.
        time.sleep(3)
        with pytest.raises(RuntimeError, match=r"an earlier call ended this pool(.|\n)*ValueError: boom"):
            pool.run(rank_of)


def test_a_rank_that_does_not_answer_ends_the_pool(monkeypatch):
    monkeypatch.setattr(testing, "_START_S", 5.0)
    with RankPool(1, timeout_s=5.0) as pool:
        with pytest.raises(RuntimeError, match=r"no answer from ranks \[0\] within 10 s"):
            pool.run(late, -1, 60.0)
        for process in pool._processes:
            process.join(5)
            assert process.exitcode == -signal.SIGKILL


def test_an_interrupted_call_ends_the_pool():
    with RankPool(1) as pool:
        assert pool.run(rank_of) == [0]
        before = signal.signal(signal.SIGUSR1, interrupt)
        try:
            Timer(0.5, os.kill, (os.getpid(), signal.SIGUSR1)).start()
            with pytest.raises(KeyboardInterrupt):
                pool.run(late, -1, 60.0)
        finally:
            signal.signal(signal.SIGUSR1, before)
        with pytest.raises(RuntimeError, match="an earlier call ended this pool, make another: it was interrupted"):
            pool.run(rank_of)


def interrupt(number, frame):
    raise KeyboardInterrupt
