"""Ranks that split weights have the same samples, tokens and rows: loaders, sums and metrics count them once."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parallelize.tensor_parallel import tensor_parallel_ranks

SPLIT = {"tensor_parallel_size": 2, "ring_size": 2}


def test_sums_metrics_and_losses_over_rows_are_those_of_one_process(pools: Any) -> None:
    expected = pools(1).run(tensor_parallel_ranks.counted, 1, {})[0]
    for answer in pools(4).run(tensor_parallel_ranks.counted, 4, SPLIT):
        assert answer.keys() == expected.keys()
        for name, value in expected.items():
            assert answer[name] == pytest.approx(value, rel=1e-9), name


def test_a_stream_without_a_seed_is_read_by_one_rank_of_all_that_share_its_samples(pools: Any) -> None:
    answers = pools(2).run(tensor_parallel_ranks.streamed, 2, {"tensor_parallel_size": 2})
    assert len(answers[0]) == 4
    assert answers[0] == answers[1]


def test_whole_parameters_that_come_apart_between_parts_are_named(pools: Any) -> None:
    first, *_ = pools(2).run(tensor_parallel_ranks.drifted, 2, {"tensor_parallel_size": 2})
    assert first is not None
    assert "1 of " in first
    assert "model.norm.weight" in first
    assert "ranks [0] and [1] hold other numbers" in first
