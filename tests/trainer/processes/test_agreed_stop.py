"""`trainer.should_stop` ends a fit on all ranks, or is refused on all of them."""

from __future__ import annotations

import pytest

from tests.slow import slow
from tests.trainer.processes import stop_ranks as ranks

DEGREES = {"groups": {"data_parallel_size": 2}, "one sequence": {"sequence_parallel_size": 2}}


FAST = ("on_train_batch_end",)
WHERE = [*FAST, *slow(*(each for each in ranks.WHERE if each not in FAST))]


@pytest.mark.parametrize("degrees", ["groups", *slow("one sequence")])
@pytest.mark.parametrize("where", WHERE)
def test_a_rank_that_stops_alone_is_refused_on_all(pools, where, degrees):
    answers = pools(2).run(ranks.fit, 2, where, (1,), DEGREES[degrees])
    for message, _ in answers:
        assert message.startswith("ranks would go on in other ways: "), message
        assert "trainer.should_stop is False on rank 0; " in message
        assert "reduce_boolean_decision" in message
    assert answers[0] == answers[1]


@pytest.mark.parametrize("where", WHERE)
def test_ranks_that_stop_together_end_where_one_device_does(pools, where):
    [(_, steps)] = pools(1).run(ranks.fit, 1, where, (0,), None)
    assert pools(2).run(ranks.fit, 2, where, (0, 1), DEGREES["groups"]) == [("", steps)] * 2


@pytest.mark.slow
def test_a_stop_before_the_least_steps_is_compared_too(pools):
    """One device goes on until `min_steps`, and stops there."""
    where, options = "on_train_batch_end", {"min_steps": 6}
    [(_, steps)] = pools(1).run(ranks.fit, 1, where, (0,), None, options)
    assert steps == 6
    assert pools(2).run(ranks.fit, 2, where, (0, 1), DEGREES["groups"], options) == [("", steps)] * 2


@pytest.mark.slow
def test_one_that_stops_with_the_last_step_of_all_has_harmed_nobody(pools):
    where, options = "on_train_epoch_end", {"max_epochs": 1}
    answers = pools(2).run(ranks.fit, 2, where, (1,), DEGREES["groups"], options)
    assert answers == [("", ranks.BATCHES)] * 2
