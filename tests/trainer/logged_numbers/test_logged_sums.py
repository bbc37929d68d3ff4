"""Sums over ranks that share a sequence: parts add up, what all have counts once, and what nobody can tell is said."""

from __future__ import annotations

import pytest

from tests.trainer.logged_numbers import logged_sums_ranks as ranks


def test_the_preflight_tells_parts_from_what_ranks_have_together(pools):
    (alone, _), *_ = pools(1).run(ranks.fit, 1, {"sequence_parallel_size": 1})
    assert alone["kilotokens"] == pytest.approx(4 * 32 / 1000)
    for found, said in pools(2).run(ranks.fit, 2, {"ulysses_size": 2}):
        assert _numbers(found) == pytest.approx(_numbers(alone), rel=1e-6)
        assert said == []


def test_in_the_global_view_what_ranks_have_alike_is_theirs_together(pools):
    """A hook's whole number, and what it adds up by hand, too."""
    (alone, _), *_ = pools(1).run(ranks.fit, 1, {"sequence_parallel_size": 1}, 3)
    for found, said in pools(2).run(ranks.fit, 2, {"ulysses_size": 2, "global_view": True}, 3):
        assert found["by hand"] == pytest.approx(alone["by hand"], rel=1e-10)
        assert _numbers(found) == pytest.approx(_numbers(alone), rel=1e-6)
        assert said == []


def test_what_a_hook_adds_up_of_the_whole_batch_counts_once(pools):
    (alone, _), *_ = pools(1).run(ranks.fit, 1, {"sequence_parallel_size": 1}, 5)
    for found, said in pools(2).run(ranks.fit, 2, {"ulysses_size": 2}, 5):
        assert found["by hand"] == alone["by hand"]
        assert _numbers(found) == pytest.approx(_numbers(alone), rel=1e-6)
        assert said == []


def test_a_trial_of_a_batch_that_logs_others_leaves_what_is_known(pools):
    """Of six batches the first, third and fifth log; the second logs another number, and is tried behind its step."""
    (alone, _), *_ = pools(1).run(ranks.fit, 1, {"sequence_parallel_size": 1}, 2)
    assert alone["kilotokens"] == pytest.approx(6 * 32 / 1000)
    for found, said in pools(2).run(ranks.fit, 2, {"ulysses_size": 2}, 2):
        assert _numbers(found) == pytest.approx(_numbers(alone), rel=1e-6)
        assert said == []


def test_without_it_equal_values_are_said_to_be_taken_for_one_or_the_other(pools):
    for rank, (_, said) in enumerate(pools(2).run(ranks.fit, 2, {"ulysses_size": 2, "preflight": False})):
        assert [each.partition(",")[0] for each in said] == ["kilotokens", "rows", "loss"] * (rank == 0)
        assert all("data_parallel_group counts it once" in each for each in said)


def test_a_loss_that_a_step_adds_up_by_hand_counts_once(pools):
    """Before its trial, in one and in training; it says what it is taken for."""
    for rank, (found, said) in enumerate(pools(2).run(ranks.fit, 2, {"ulysses_size": 2}, 4)):
        assert found["by hand"] == pytest.approx(found["losses"], rel=1e-12)
        assert ["logged_sums_ranks.py" in each and "counts once" in each for each in said] == [True] * (rank == 0)


def _numbers(found):
    return {name: value for name, value in found.items() if isinstance(value, float)}
