"""A step that draws from a generator of its own is compared from other seeds, too: a permutation of two rows may have been none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from lightning_sp.step.isolation import own_streams

# Of as many the chance that two rows stay in their order each time is one in 32, with that of the first run.
OTHER_SEEDS = (1, 2, 3, 4)


def noting_own_draws(run: Callable[[], Any], module: nn.Module, found: list[bool]) -> Callable[[], Any]:
    """Return a run of a step that notes whether a generator of the user's own has drawn in it.

    Args:
        run: of the step.
        module: of the user.
        found: gets one more.
    """

    def noted() -> Any:
        streams = own_streams(module)
        output = run()
        found.append(any(each.has_drawn for each in streams))
        return output

    return noted


@contextmanager
def drawn_otherwise(module: nn.Module, seed: int) -> Iterator[None]:
    """Let the user's own generators draw from a seed, alike on all ranks; their states are put back."""
    streams = own_streams(module)
    try:
        for number, each in enumerate(streams):
            each.seed(1_000 * seed + number)
        yield
    finally:
        for each in streams:
            each()
