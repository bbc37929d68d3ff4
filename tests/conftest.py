from __future__ import annotations

import os

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

from lightning_sp.testing import RankPool

# Ranks and tests share a few cores: how long one example takes says nothing.
settings.register_profile("default", deadline=None)
settings.load_profile("default")
# `make test-long` chooses it.
settings.register_profile("long", max_examples=2000, deadline=None)


@pytest.fixture(scope="session")
def pools():
    """Worlds by size, started on first use and shared by all distributed tests of the session, until a call in them fails."""
    started: dict[int, RankPool] = {}

    def pool(size: int) -> RankPool:
        if size not in started or started[size].failure is not None:
            started[size] = RankPool(size)
        return started[size]

    yield pool
    for each in started.values():
        each.stop()
    for each in started.values():
        each.close()
