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


# Of a call: a minute on two idle cores. Less than a test's (pyproject.toml), so that it is the pool that says which ranks did not answer.
TIMEOUT_S = 480.0


@pytest.fixture(scope="session")
def pools():
    """Worlds by size, started on first use and shared by all distributed tests of the session, until a call in them fails."""
    started: dict[int, RankPool] = {}

    def pool(size: int) -> RankPool:
        if size in started and started[size].failure is not None:
            started.pop(size).close()
        if size not in started:
            started[size] = RankPool(size, timeout_s=TIMEOUT_S)
        return started[size]

    yield pool
    for each in started.values():
        each.stop()
    for each in started.values():
        each.close()
