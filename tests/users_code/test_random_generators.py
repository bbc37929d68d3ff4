"""A generator of the user's own has drawn, is put back, and draws from a seed."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from lightning_sp.users_code.random_generators import RandomGenerator, is_random_generator

DRAWS = {
    "torch": (torch.Generator(), lambda generator: float(torch.rand((), generator=generator))),
    "Python": (random.Random(7), random.Random.random),
    "numpy": (np.random.default_rng(7), lambda generator: float(generator.random())),
    "numpy, of old": (np.random.RandomState(7), lambda generator: float(generator.rand())),
}


@pytest.mark.parametrize("kind", DRAWS)
def test_each_kind_is_told_put_back_and_seeded(kind):
    generator, draw = DRAWS[kind]
    assert is_random_generator(generator)
    kept = RandomGenerator(generator)
    assert not kept.has_drawn
    first = draw(generator)
    assert kept.has_drawn
    kept()
    assert not kept.has_drawn
    assert draw(generator) == first
    kept.seed(11)
    seeded = draw(generator)
    kept.seed(11)
    assert draw(generator) == seeded != first
    kept.seed_extreme(low=True)
    assert draw(generator) < 0.01
    assert draw(generator) < 0.05
    kept.seed_extreme(low=False)
    assert draw(generator) > 0.99


def test_the_systems_own_has_no_state():
    assert not is_random_generator(random.SystemRandom())


class OneNumber(random.Random):
    """A user's own, which gives one number whatever its seed."""

    def random(self) -> float:
        return 0.5


def test_a_search_for_seldom_draws_ends():
    generator = OneNumber(0)
    before = RandomGenerator(generator)
    before.seed_extreme(low=True)
    before()
    assert generator.random() == 0.5
