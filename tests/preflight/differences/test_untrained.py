"""Batches of any names are validated, tested and predicted with before any fit, as one device does."""

from __future__ import annotations

import pytest

from tests.preflight.differences import untrained_ranks as ranks
from tests.slow import slow


@pytest.mark.parametrize("nested", [False, *slow(True)], ids=["tuples", "nested"])
def test_what_no_training_step_has_shown_is_evaluated_in_the_global_view(pools, nested):
    [plain] = pools(1).run(ranks.evaluate_then_fit, 1, None, nested)
    for found in pools(2).run(ranks.evaluate_then_fit, 2, dict(ring_size=2), nested):
        for when in ("before", "after"):
            assert found[when][0] == pytest.approx(plain[when][0], rel=1e-10), when
        assert found.get("predicted") == plain.get("predicted")
        for name, weight in plain["weights"].items():
            assert (found["weights"][name] - weight).abs().max() <= 1e-10, name


def test_tags_that_only_some_batches_could_be_told_from_tokens_by_are_those_of_one_device(pools):
    [plain] = pools(1).run(ranks.tagged, 1, None)
    for found in pools(2).run(ranks.tagged, 2, dict(ring_size=2)):
        assert found == pytest.approx(plain, rel=1e-10)
