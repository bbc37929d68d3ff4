"""A step that draws from a generator of its own is compared from other seeds, too: a permutation of two rows may have been none.

if self.generator.random() < 0.1: ids = ids.flip(1)      five draws miss this more often than not; of two seeds the draws are near 0, and near 1
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from lightning_sp.step.isolation.snapshot import random_generators

# With the first run's these leave two rows in their order each time once in 32.
OTHER_SEEDS = (1, 2, 3, 4)
EXTREMES = ("low", "high")


def noting_random_generators(run: Callable[[], Any], module: nn.Module, found: list[bool]) -> Callable[[], Any]:
    """Return a run of a step that notes whether a generator of the user's own has drawn in it.

    Args:
        run: of the step.
        module: of the user.
        found: gets one more.
    """

    def noted() -> Any:
        generators = random_generators(module)
        output = run()
        found.append(any(each.has_drawn for each in generators))
        return output

    return noted


@contextmanager
def drawn_from_seed(module: nn.Module, seed: int | str) -> Iterator[None]:
    """Let the user's own generators draw from a seed, alike on all ranks; their states are put back.

    Args:
        module: of the user.
        seed: a number, or one of `EXTREMES`.
    """
    generators = random_generators(module)
    try:
        for number, each in enumerate(generators):
            if isinstance(seed, str):
                each.seed_extreme(low=seed == "low")
            else:
                each.seed(1_000 * seed + number)
        yield
    finally:
        for each in generators:
            each()
