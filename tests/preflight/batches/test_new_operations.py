"""Steps that do what none before did, between two trials: the next one is tried."""

from __future__ import annotations

import pytest
import torch

from lightning_sp.loss.operations import SeenOperations, pairs_of
from tests.preflight.batches import new_operations_ranks as ranks
from tests.slow import slow


def test_pairs_name_what_a_loss_is_made_of():
    x = torch.ones(3, requires_grad=True)
    assert pairs_of(x.detach().sum()) == set()
    found = pairs_of(x.exp().sum())
    assert {("SumBackward0", "ExpBackward0"), ("ExpBackward0", "torch::autograd::AccumulateGrad")} == found
    seen = SeenOperations()
    assert not seen.add(x.exp().sum())  # of a trial
    assert not seen.add(x.exp().sum(), is_tried=False)
    again = x.exp().exp().sum()  # no operation that was not there, in another order
    assert [seen.add(again, is_tried=False) for _ in range(8)] == [True, True, False, True, False, False, False, True]
    assert not seen.add(x.exp().sum(), is_tried=False)
    assert not seen.are_shown
    seen.add(again)
    assert seen.are_shown
    assert not seen.add(again, is_tried=False)


@pytest.mark.parametrize("kind", ["sums", "long"])
def test_before_the_step_behind_one_of_new_operations_its_batch_is_tried(pools, kind):
    for found in pools(2).run(ranks.fit, kind, 7):
        assert "2 x 32 tokens after 5 optimizer steps gives another result" in found["error"]
        assert "cumulative sum" in found["error"]


@pytest.mark.parametrize(("kind", "step"), [*slow(("sixth", 6)), ("read", 6), ("last loss", 5)])
def test_a_step_is_tried_as_it_was_though_the_next_one_would_not_do_so(pools, kind, step):
    for found in pools(2).run(ranks.fit, kind, 8):
        assert f"2 x 32 tokens after {step} optimizer steps gives another result" in found["error"]
        assert "cumulative sum" in found["error"]


def test_what_no_trial_shows_is_said_not_to_be_compared(pools):
    found, _ = pools(2).run(ranks.fit, "drawn", 8)
    assert found["error"] == ""
    assert [
        "loss at optimizer step 4 was made of operations that none before was" in each for each in found["said"]
    ] == [True]


def test_what_is_carried_after_all_says_that_steps_before_were_not(pools):
    found, _ = pools(2).run(ranks.fit, "sums", 7, "auto")
    assert found["error"] == ""
    assert (found["whole"], found["searches"]) == (True, 0)
    assert ["in the global view from optimizer step 5 on" in each for each in found["said"]] == [True]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "whole"), [("cut", False), pytest.param("whole lines", True, marks=pytest.mark.slow)])
def test_what_would_have_ended_a_step_on_its_part_is_no_word_against_steps_before(pools, kind, whole):
    """A hook that cuts its batch shorter needs no global view: the attention follows what the hook has left."""
    for found in pools(2).run(ranks.fit, kind, 5, "auto"):
        assert (found["error"], found["whole"], found["said"]) == ("", whole, [])


def test_the_cause_is_looked_for_once_the_global_view_refuses_a_step_too(pools):
    for found in pools(2).run(ranks.fit, "sparse", 7, "auto"):
        assert "cumulative sum" in found["error"]
        assert "The global view was tried (global_view='auto'), and refuses it, too: " in found["error"]
        assert (found["whole"], found["searches"]) == (False, 1)


@pytest.mark.slow
def test_new_operations_that_are_exact_say_nothing_but_at_the_end_of_a_fit(pools):
    for found in pools(2).run(ranks.fit, "numbers", 7):
        assert (found["error"], found["said"], found["whole"]) == ("", [], False)
    found, _ = pools(2).run(ranks.fit, "numbers", 5)
    assert ["at the last of 5 optimizer steps is made of operations" in each for each in found["said"]] == [True]


def test_a_number_that_becomes_a_ranks_own_in_a_later_validation_is_named_once(pools):
    found, _ = pools(2).run(ranks.validations)
    assert ["highest = " in each for each in found] == [True]
