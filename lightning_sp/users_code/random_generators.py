"""Random generators that a user's code keeps for itself: their states are put back, and set anew."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

_KINDS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)

# What a rare branch asks of a first number between 0 and 1, or of a second: `< 0.02`, `> 0.98`. About one seed in 2,000 is such.
_LOW, _NEXT_LOW = 0.01, 0.05
# So many are tried: a generator of the user's own class may give one number whatever its seed.
_MOST_SEEDS = 20_000


class RandomGenerator:
    """A generator and the state that it had; a call puts the state back. A class because it is seeded, too.

    Args:
        generator: torch's, Python's or one of numpy's.
    """

    def __init__(self, generator: Any) -> None:
        self._generator = generator
        self._before = _state_of(generator)

    def __call__(self) -> None:
        """Put the state back."""
        generator = self._generator
        if isinstance(generator, random.Random):
            generator.setstate(self._before)
        elif isinstance(generator, np.random.Generator):
            generator.bit_generator.state = self._before
        else:
            generator.set_state(self._before)

    @property
    def generator(self) -> Any:
        """The generator."""
        return self._generator

    @property
    def has_drawn(self) -> bool:
        """Whether it has another state now."""
        now = _state_of(self._generator)
        if isinstance(now, Tensor):
            return not torch.equal(now, self._before)
        return pickle.dumps(now) != pickle.dumps(self._before)  # numpy's hold arrays

    def seed(self, seed: int) -> None:
        """Let it draw from a seed."""
        generator = self._generator
        if isinstance(generator, torch.Generator):
            generator.manual_seed(seed)
        elif isinstance(generator, np.random.Generator):
            generator.bit_generator.state = type(generator.bit_generator)(seed).state
        else:
            generator.seed(seed)

    def seed_extreme(self, *, low: bool) -> None:
        """Let it draw from a seed whose first two numbers between 0 and 1 are near to 0, or to 1: what happens seldom happens then."""
        self.seed(extreme_seed(self.seed, self._two_numbers, low=low))

    def _two_numbers(self) -> Any:
        generator = self._generator
        if isinstance(generator, torch.Generator):
            return torch.rand(2, generator=generator, device=generator.device).tolist()
        if isinstance(generator, np.random.RandomState):
            return generator.random_sample(2)
        return generator.random(), generator.random()


def extreme_seed(seed: Callable[[int], Any], draw: Callable[[], Any], *, low: bool) -> int:
    """Return the first seed of a generator whose first two numbers between 0 and 1 are near to 0, or to 1; the last tried where none are.

    Args:
        seed: lets it draw from one.
        draw: two numbers.
        low: whether near to 0.
    """
    for each in range(_MOST_SEEDS):
        seed(each)
        first, second = draw() if low else (1 - number for number in draw())
        if first < _LOW and second < _NEXT_LOW:
            break
    return each


def is_random_generator(value: Any) -> bool:
    """Return whether a value is a generator whose state can be kept: the system's own has none."""
    kind: type = type(value)
    return is_kind_of_generator(kind)


@cache
def is_kind_of_generator(kind: type) -> bool:
    """Return whether objects of a class are such generators."""
    return issubclass(kind, _KINDS) and not issubclass(kind, random.SystemRandom)


def _state_of(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state()
