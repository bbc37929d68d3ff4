"""What a step reads of tensors that an earlier one has left is compared before the first step, in a second step on the same rows."""

from __future__ import annotations

import pytest

from tests.preflight.differences import second_step_ranks as ranks


@pytest.mark.parametrize("weight", [5.0, pytest.param(0.0, marks=pytest.mark.slow)])
def test_predictions_that_the_next_epoch_reads_are_kept_in_the_global_view(pools, weight):
    [plain] = pools(1).run(ranks.fit, 1, weight)
    for found in pools(2).run(ranks.fit, 2, weight):
        assert found["whole"] == bool(weight)
        for name, each in plain["weights"].items():
            assert (found["weights"][name] - each).abs().max() <= 1e-10, name


def test_a_step_that_draws_and_keeps_a_table_draws_alike_in_its_second_step(pools):
    """Refused as wrong: of a whole run the second step went on in the stream of random numbers, and on shards it began it again."""
    assert pools(2).run(ranks.draw) == [(True, 2)] * 2


@pytest.mark.parametrize("by", ["step", "calls", "length"])
def test_a_later_step_that_reads_what_the_first_has_left_is_tried_behind_it(pools, by):
    """By itself it fails, on one device too: it was said to be not compared, and trained."""
    for refusal, said in pools(2).run(ranks.read, by, 1.0):
        assert "behind another step has another loss on ranks that share a sequence" in refusal
        assert not said
    assert pools(2).run(ranks.read, by, 0.0) == [("", [])] * 2
