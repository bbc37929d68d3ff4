"""Random generators that a user's code keeps for itself: their states are put back, and set anew."""

from __future__ import annotations

import pickle
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

_KINDS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


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


def is_random_generator(value: Any) -> bool:
    """Return whether a value is a generator whose state can be kept: the system's own has none."""
    return isinstance(value, _KINDS) and not isinstance(value, random.SystemRandom)


def _state_of(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state()
