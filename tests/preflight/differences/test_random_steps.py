"""A step that draws random numbers goes on in the global view, where a trial draws what one device draws from its seed."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.preflight.differences import random_steps_ranks as ranks

RING, GROUPS = dict(ring_size=2), dict(data_parallel_size=2, ulysses_size=2)


@pytest.mark.parametrize(
    ("kind", "world", "strategy"),
    [
        ("drawn whole", 2, RING),
        pytest.param("like", 2, RING, marks=pytest.mark.slow),
        pytest.param("noise", 2, RING, marks=pytest.mark.slow),
        pytest.param("rows exchanged", 2, RING, marks=pytest.mark.slow),
        pytest.param("rows exchanged by torch", 2, RING, marks=pytest.mark.slow),
        pytest.param("drawn whole", 4, GROUPS, marks=pytest.mark.slow),
        pytest.param("noise", 4, GROUPS, marks=pytest.mark.slow),
    ],
)
def test_random_steps_are_compared_from_one_seed(pools: Any, kind: str, world: int, strategy: dict[str, int]):
    (said, *_) = pools(world).run(ranks.fit, world, kind, strategy)
    assert len(said) == 1, said
    (difference,) = re.findall(r"whole and sharded, agree: .* gradient ([\d.e+-]+)", said[0])
    assert float(difference) < 1e-12


@pytest.mark.slow
def test_a_step_of_which_each_rank_draws_another_is_refused(pools: Any):
    for said in pools(2).run(ranks.fit, 2, "each rank another", RING):
        (refused,) = (each for each in said if each.startswith("refused: "))
        assert "since the step draws random numbers: rand of (2, 1) in training_step" in refused
        assert "The global view was tried (global_view='auto'), and refuses it, too" in refused


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (
            "rows exchanged",
            "a crop of 2 x 18 tokens with other draws of the step's own generators, gives another result",
        ),
        ("rows exchanged by torch", "since the step draws random numbers: randperm of (2,) in training_step"),
        (
            "seldom turned",
            "a crop of 2 x 18 tokens with other draws of the step's own generators, gives another result",
        ),
        ("seldom turned by Python", "since the step draws random numbers: random in training_step"),
    ],
)
def test_what_a_first_draw_does_not_do_is_done_by_others(pools: Any, kind: str, words: str):
    """A part of the sequence is cut at other places than the whole, or is turned around by itself."""
    for said in pools(2).run(ranks.fit, 2, kind, RING | dict(global_view=False)):
        assert words in said[-1], said


def test_without_the_global_view_a_random_step_is_refused(pools: Any):
    for said in pools(2).run(ranks.fit, 2, "drawn whole", RING | dict(global_view=False)):
        assert said[-1].startswith(
            "refused: preflight: training_step on a crop of 2 x 18 tokens cannot be compared, since"
        )
