"""One rank fails in a trial, in the model's own words, while the others wait for it in a collective: all fail together, and go on."""

from __future__ import annotations

from typing import Any

import pytest

from tests.preflight import lone_errors_ranks as ranks

PLACES = ("step", "block", "backward", "last of the backward")
SLOW = ("loss", "block's backward")


@pytest.mark.parametrize(
    ("axis", "place"),
    [
        *(("ring_size", place) for place in PLACES),
        *(pytest.param("ring_size", place, marks=pytest.mark.slow) for place in SLOW),
        *(pytest.param("ulysses_size", place, marks=pytest.mark.slow) for place in (*PLACES, *SLOW)),
    ],
)
def test_a_step_that_one_rank_fails_in_goes_on_in_the_global_view(pools: Any, axis: str, place: str):
    expected = pools(1).run(ranks.weights, 1, place)[0]
    assert max(pools(2).run(ranks.error_of_weights, 2, place, expected, {axis: 2})) <= 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("place", ["block", "block's backward"])
def test_ranks_of_other_rows_are_told_too(pools: Any, place: str):
    expected = pools(1).run(ranks.weights, 1, place)[0]
    errors = pools(4).run(ranks.error_of_weights, 4, place, expected, {"ring_size": 2, "data_parallel_size": 2})
    assert max(errors) <= 1e-10


def test_an_evaluation_that_one_rank_fails_in_goes_on_in_the_global_view(pools: Any):
    expected = pools(1).run(ranks.validated, 1)[0]
    assert pools(2).run(ranks.validated, 2, {"ring_size": 2, "global_view": "auto"}) == pytest.approx(
        [expected] * 2, 1e-6
    )


def test_an_index_beyond_a_part_is_found_before_any_rank_fails(pools: Any):
    told = pools(2).run(ranks.refusal_of_part, "heads")
    assert "reads a rank's part by an index beyond it (index " in told[0]
    assert told[0] == told[1]


@pytest.mark.parametrize("place", ["block", "backward"])
def test_on_parts_alone_all_ranks_refuse_it_in_the_words_of_the_one_that_failed(pools: Any, place: str):
    told = pools(2).run(ranks.refusal, 2, place, {"ring_size": 2})
    assert "fails on shards: ArithmeticError: no mark among these tokens; " in told[0]
    assert told[0] == told[1]


def test_what_one_rank_fails_in_whole_is_told_by_all(pools: Any):
    told = pools(2).run(ranks.refusal, 2, "whole run", {"ring_size": 2})
    assert "training_step fails on a crop of 4 x 32 tokens: ZeroDivisionError: rank 1 alone; " in told[0]
    assert told[0] == told[1]


def test_an_evaluation_that_one_rank_fails_in_whole_is_told_in_its_words(pools: Any):
    expected = pools(1).run(ranks.validated, 1, None, "loss", 1)[0]
    (said, loss), (_, other) = pools(2).run(ranks.said_and_validated, {"ring_size": 2})
    assert said[0].endswith(
        "validation_step was not compared with one device: SequenceParallelError: ZeroDivisionError: rank 1 alone"
    )
    assert [loss, other] == pytest.approx([expected] * 2, 1e-6)
    assert len(said) == 6  # of 12 batches the first four, the 6th and the 9th
