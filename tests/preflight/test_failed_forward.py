"""A forward that ends by an error in the middle leaves shards, not whole parameters: in the preflight's crops, and in a run before this one."""

from __future__ import annotations

from typing import Any

import pytest

from tests.preflight import failed_forward_ranks as ranks


@pytest.mark.parametrize("fails_at", [-1, 1], ids=["a shorter crop", "an earlier fit"])
def test_what_failed_leaves_no_trace(pools: Any, fails_at: int):
    assert max(pools(2).run(ranks.fitted, fails_at)) <= 1e-12
