"""Dropout of what runs whole on every rank of a sequence: one mask for all of them, in a recomputation too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.context import unsharded_ranks as ranks

WAYS = [
    pytest.param("plain", {}, marks=pytest.mark.slow),
    pytest.param("around", {}, marks=pytest.mark.slow),
    ("inside", {}),
    pytest.param("plain", {"activation_checkpointing": True}, marks=pytest.mark.slow),
]
CALLS = 4  # two pictures, two blocks


@pytest.mark.parametrize(("how", "options"), WAYS, ids=str)
def test_ranks_of_a_sequence_drop_alike_and_recompute_the_same(pools: Any, how: str, options: dict[str, Any]):
    hold_masks(pools, how, options, [dict(ring_size=2)])


@pytest.mark.slow
@pytest.mark.parametrize(("how", "options"), WAYS, ids=str)
def test_ranks_of_ulysses_drop_alike_and_recompute_the_same(pools: Any, how: str, options: dict[str, Any]):
    hold_masks(pools, how, options, [dict(ulysses_size=2)])


def hold_masks(pools: Any, how: str, options: dict[str, Any], strategies: list[dict[str, int]]) -> None:
    recomputes = how != "plain" or options
    for strategy in strategies:
        first, second = pools(2).run(ranks.trained, {**strategy, **options}, how, 2)
        assert first["own"] != second["own"]
        seen = []
        for own, other in zip(first["drawn"], second["drawn"], strict=True):
            assert len(own) == len(other) == CALLS * (2 if recomputes else 1)
            assert all(torch.equal(*pair) for pair in zip(own, other, strict=True))
            assert all(0.3 < float((each == 0).double().mean()) < 0.7 for each in own)
            again = own[CALLS:]
            assert all(sum(torch.equal(each, made) for made in own[:CALLS]) == 1 for each in again)
            seen += own[:CALLS]
        # Calls and steps, and the rows of a call, have masks of their own.
        masks = {tuple((row == 0).flatten().tolist()) for each in seen for row in each}
        assert len(masks) == 2 * CALLS * 2


def test_groups_drop_otherwise(pools: Any):
    found = pools(4).run(ranks.trained, dict(data_parallel_size=2, ring_size=2), "inside", 1)
    for step in range(2):
        of_ranks = [torch.stack(each["drawn"][step]) for each in found]
        assert torch.equal(of_ranks[0], of_ranks[1])
        assert torch.equal(of_ranks[2], of_ranks[3])
        assert not torch.equal(of_ranks[0] == 0, of_ranks[2] == 0)
