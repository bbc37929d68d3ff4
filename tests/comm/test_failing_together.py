"""A rank that fails by itself: no other waits for it in a collective, and the groups work on."""

from __future__ import annotations

from typing import Any

import pytest

from tests.comm import failing_together_ranks as ranks

OWN, PEER = "ArithmeticError", "PeerError"


@pytest.mark.parametrize("calls", ["", "w", "wpwwp"])
def test_without_a_failure_nothing_is_told(pools: Any, calls: str):
    assert pools(4).run(ranks.told, calls, {}) == [""] * 4


@pytest.mark.parametrize(
    ("calls", "failing"),
    [("", {0: 0}), ("www", {1: 1}), ("pppw", {2: 1}), ("wpw", {0: 3}), ("pppp", {3: 0}), ("wpwp", {1: 2, 2: 3})],
    ids=["no collective", "the world's", "a pair's", "at the end", "the first", "two, one after the other"],
)
def test_all_fail_where_one_does(pools: Any, calls: str, failing: dict[int, int]):
    told = pools(4).run(ranks.told, calls, failing)
    first = min(failing, key=lambda rank: failing[rank])
    assert told[first] == OWN
    assert all(said in (OWN, PEER) for said in told)
    assert all(said == PEER for rank, said in enumerate(told) if rank not in failing)


@pytest.mark.parametrize(("call", "named"), [
    ("shape", "an all-reduce of (2,), torch.float32"), ("kind", "an all-gather of objects"), ("end", "the end"),
])  # fmt: skip
def test_ranks_that_come_to_different_collectives_are_told_of_both(pools: Any, call: str, named: str):
    told = pools(4).run(ranks.apart, call)
    assert all(told)
    error = next(each for each in told if each.startswith("SequenceParallelError"))
    assert "ranks come to different collectives: rank " in error
    assert "to an all-reduce of (1,), torch.float32 (" in error
    assert f"rank 1 to {named} (" in error
    assert "failing_together_ranks.py:" in error


@pytest.mark.parametrize(
    "ways", [("pw", "wp", "pw", "pw"), ("wppw", "wpw", "wpw", "wpw")], ids=["the first", "a later one"]
)
def test_ranks_that_wait_for_each_other_in_different_groups_are_told_of_both(pools: Any, ways: tuple[str, ...]):
    told = pools(4).run(ranks.crossed, ways)
    assert all(told)
    error = next(each for each in told if each.startswith("SequenceParallelError"))
    assert "ranks come to different collectives: rank " in error
    assert "an all-reduce of (1,), torch.float32 (" in error
    assert "an all-reduce of (2,), torch.float32 (" in error
