"""What one rank alone writes to its part of the model ends the run by name, before the next update."""

from __future__ import annotations

import itertools

import pytest

from tests.slow import slow
from tests.step.agreement import agreed_writes_ranks as ranks

LAYOUT = dict(ulysses_size=2, preflight=False)
NORM = "ranks have written to their parts of the model differently: model.norm.weight is written to 2 times on rank 0; written to "
GRADIENT = (
    "ranks have written to their parts of the model differently: the gradient of model.norm.weight is there, with "
)
NONE = "ranks have written to their parts of the model differently: the gradient of "
WEIGHTS = ["weight", "weight's data", "weight's part", "weight's data's part", "weight's detached part", "assigned"]
# torch counts none of these.
IN_A_LIST = ["gradient clipped", "weights in a list"]


@pytest.mark.parametrize(
    "what",
    [
        *("weight", "weight's data", "weight's data's part", "zero_grad", "gradient's part"),
        *slow("weight's part", "weight's detached part", "assigned"),
        *slow("zero_grad to zeros", "no gradient", "gradient", "gradient's data"),
    ],
)
def test_a_write_of_one_rank_is_refused_before_the_update(pools, what):
    for answer in pools(2).run(ranks.fit, "on_before_optimizer_step", what, 2, LAYOUT):
        assert answer["said"].startswith(NONE if what not in WEIGHTS else NORM[:70]), answer
        assert "on rank 0; " in answer["said"]
        assert answer["steps"] == 1


@pytest.mark.parametrize("what", IN_A_LIST)
def test_a_write_of_one_rank_to_a_list_is_refused(pools, what):
    for answer in pools(2).run(ranks.fit, "on_before_optimizer_step", what, 2, LAYOUT):
        assert answer["said"].startswith("ranks have written to their parts of the model differently: "), answer
        assert answer["steps"] == 1


@pytest.mark.parametrize("what", [IN_A_LIST[0], pytest.param(IN_A_LIST[1], marks=pytest.mark.slow)])
def test_a_write_of_all_ranks_to_a_list_is_theirs(pools, what):
    for answer in pools(2).run(ranks.fit, "on_before_optimizer_step", what, 2, LAYOUT, True):
        assert answer == {"said": "", "steps": 3}


def test_an_update_that_one_rank_leaves_out_is_named(pools):
    for answer in pools(2).run(ranks.fit, "", "", 2, LAYOUT, False, ranks.LeavesOut):
        assert answer["said"].startswith(
            "ranks would go on in other ways: what comes next is an optimizer's step on rank 0; a batch on rank 1"
        ), answer


def test_a_write_of_one_rank_at_the_end_of_a_fit_is_refused(pools):
    """No batch follows, and what is saved or exported then would be of both."""
    for answer in pools(2).run(ranks.fit, "on_train_end", "weight", 2, LAYOUT):
        assert answer["said"].startswith(NORM[:70]), answer
        assert answer["steps"] == 3
    for answer in pools(2).run(ranks.fit, "on_train_end", "weight", 2, LAYOUT, True):
        assert answer == {"said": "", "steps": 3}


def test_a_write_of_one_rank_behind_a_run_is_refused_by_what_comes_next(pools, tmp_path):
    for *said, _ in pools(2).run(ranks.behind, str(tmp_path), 2, LAYOUT, False):
        assert all(
            "model.norm.weight is written to 0 times behind the run on rank 0; written to 1 times behind" in each
            for each in said
        ), said
    assert not list(tmp_path.iterdir())
    assert pools(2).run(ranks.behind, str(tmp_path), 2, LAYOUT, True) == [[""] * 4] * 2


def test_a_gradient_that_one_rank_drops_and_another_replaces_is_refused(pools):
    for answer in pools(2).run(ranks.fit, "on_before_optimizer_step", "no gradient, or another", 2, LAYOUT, True):
        assert "the gradient of model.norm.weight is another one on rank 0; none on rank 1" in answer["said"], answer
        assert answer["steps"] == 1


@pytest.mark.parametrize(
    ("where", "what"),
    [
        ("training_step", "weight's data"),
        *(("on_after_backward", each) for each in ("zero_grad", "gradient")),
        *slow(("training_step", "zero_grad"), ("on_after_backward", "gradient's data")),
    ],
)
def test_wherever_before_the_update_it_is(pools, where, what):
    for answer in pools(2).run(ranks.fit, where, what, 2, LAYOUT):
        assert answer["said"].startswith(NONE if what not in WEIGHTS else NORM[:70]), answer
        assert answer["steps"] == 1


# Each kind of a write once, and each place.
STATES = ["state", "state's part", "state's step", "state's entry", "state's new entry", "no state"]
PLACES = ["on_before_optimizer_step", "on_train_batch_end", "training_step"]
STATES_AT = [
    ("state", "on_train_batch_end"),
    ("state's part", "training_step"),
    ("state's entry", "on_before_optimizer_step"),
    ("no state", "on_before_optimizer_step"),
]


@pytest.mark.parametrize(
    ("what", "where"),
    [*STATES_AT, *slow(*(each for each in itertools.product(STATES, PLACES) if each not in STATES_AT))],
)
def test_a_write_of_one_rank_to_its_optimizers_state_is_refused(pools, what, where):
    """Each rank steps its own part of a matrix by it."""
    told = (
        "written to 1 times, with 0"
        if what in ("state", "state's part", "state's step")
        else "written to 0 times, with "
    )
    for answer in pools(2).run(ranks.fit, where, what, 2, LAYOUT):
        assert answer["said"].startswith(
            "ranks have written to their parts of the model differently: the optimizer's state of model."
        ), answer
        assert f"entries exchanged on rank 0; {told}" in answer["said"], answer
        assert answer["steps"] == 1


@pytest.mark.parametrize("what", ["state's entry", *slow("state", "state's step", "no state")])
def test_a_write_of_all_ranks_to_their_optimizers_state_is_theirs(pools, what):
    for answer in pools(2).run(ranks.fit, "on_train_batch_end", what, 2, LAYOUT, True):
        assert answer == {"said": "", "steps": 3}


@pytest.mark.parametrize(
    "what",
    [
        *("weight's data's part", "zero_grad"),
        *slow("weight", "weight's data", "weight's part", "weight's detached part", "assigned"),
    ],
)
def test_a_write_after_the_update_is_refused_with_the_next_batch(pools, what):
    for answer in pools(2).run(ranks.fit, "on_train_batch_end", what, 2, LAYOUT):
        assert answer["said"].startswith("ranks have written to their parts of the model differently: "), answer
        assert answer["steps"] == 1


@pytest.mark.parametrize(
    "what",
    [
        *("weight's data's part", "assigned", "assigned uneven", "zero_grad to zeros"),
        *slow("weight", "weight's data", "weight's part", "weight's detached part", "gradient's data"),
    ],
)
def test_a_write_of_all_ranks_is_theirs(pools, what):
    for answer in pools(2).run(ranks.fit, "on_before_optimizer_step", what, 2, LAYOUT, True):
        assert answer == {"said": "", "steps": 3}


@pytest.mark.parametrize("where", ["on_before_optimizer_step", *slow("on_train_batch_end", "on_train_batch_start")])
def test_a_rank_may_read_its_part(pools, where):
    for answer in pools(2).run(ranks.fit, where, "read", 2, LAYOUT):
        assert answer == {"said": "", "steps": 3}


@pytest.mark.parametrize("kind", [ranks.Wrapped, ranks.WrappedBare])
def test_an_optimizer_around_another_trains(pools, kind):
    """Libraries' Lookahead is no optimizer by its own __init__: its hooks are plain dicts, or are not there."""
    for answer in pools(2).run(ranks.fit, "on_train_batch_end", "read", 2, LAYOUT, True, kind):
        assert answer == {"said": "", "steps": 3}


def test_a_write_to_the_state_of_an_optimizer_within_another_is_refused(pools):
    for answer in pools(2).run(ranks.fit, "on_train_batch_end", "state", 2, LAYOUT, False, ranks.Wrapped):
        assert "the optimizer's state of model." in answer["said"], answer
        assert answer["steps"] == 1
