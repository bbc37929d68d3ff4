"""SIGTERM to one rank ends the run on all of them after the same batch."""

from __future__ import annotations

from typing import Any

import pytest

from tests.trainer import sigterm_ranks as ranks

pytest.importorskip("transformers")


@pytest.mark.parametrize("layout", [dict(ring_size=2), dict(data_parallel_size=2)], ids=["ring", "groups"])
@pytest.mark.parametrize("rank", [0, 1])
def test_all_ranks_end_after_the_batch_that_follows(pools: Any, rank: int, layout: dict[str, int]):
    for found in pools(2).run(ranks.told, rank, "train", layout):
        # The signal comes within the second batch, is said of the third, and that one is trained.
        assert found == {"raised": "SIGTERMException", "steps": 3}


def test_a_validation_ends_on_all_ranks(pools: Any):
    for found in pools(2).run(ranks.told, 1, "validate", dict(ulysses_size=2)):
        assert found["raised"] == "SIGTERMException"
        assert found["steps"] == 6
