"""A step that is random cannot be compared: it is told from one that is wrong by two whole runs, from two seeds and from one."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import torch

from lightning_sp.context.streams import streams
from lightning_sp.errors import SequenceParallelError
from lightning_sp.preflight.comparison import gradient_differences
from lightning_sp.preflight.explain.verdict import relative_differences, tolerance_of
from lightning_sp.preflight.outcome import Outcome
from lightning_sp.preflight.trial import SEED, Trial
from lightning_sp.users_code.random_generators import extreme_seed

# Draws named in a message.
_NAMED = 4
# Several: a permutation of two rows is none every second time.
_OTHER_SEEDS = range(SEED + 1, SEED + 5)


def check_random_draws(trial: Trial, first: Outcome) -> None:
    """Refuse a step whose random numbers change what it gives, dropout aside. Every rank must call it.

    What each rank draws for its own tokens may be as good as what one device draws, and may not: a number that belongs to a whole row, a noise
    level or a layer that is skipped, would differ between the ranks of a sequence. From outside the two look alike.

    Args:
        trial: of the step.
        first: what its whole run gave, and drew.

    Communicates: what a whole run does, and one all_reduce.

    Raises:
        SequenceParallelError: with the functions that draw, and the modules that call them.
    """
    told = random_step(trial, first)
    if told is None:
        return
    raise SequenceParallelError(
        f"{told}. Sharded, each rank draws its own for its own tokens: what one number decides for a whole row would "
        "differ between its ranks. Switch the draws off in training (a router's jitter, a noise on the embeddings), draw them in the data, or "
        "preflight=False trains with each rank's own, unchecked"
    )


def random_step(trial: Trial, first: Outcome) -> str | None:
    """Return how random numbers change what a step gives, dropout aside; None where they do not. Every rank must call it."""
    moved: dict[str, float] = {}
    for seed in _other_seeds(first):
        moved = _moved(first, trial.whole(seed=seed))
        if moved:
            break
    if not moved:
        return None
    drawn = ", ".join(each.describe() for each in first.draws[:_NAMED])
    more = f" and {len(first.draws) - _NAMED} more" if len(first.draws) > _NAMED else ""
    return (
        f"preflight: training_step on {trial.crop} cannot be compared, since the step draws random numbers: {drawn}{more}. Whole, from two "
        f"seeds, {_described(moved, first)}"
    )


def _other_seeds(first: Outcome) -> Iterator[int]:
    """Yield seeds from which a step that has drawn is run: some, and of each stream those that make a rare branch be taken."""
    if not first.draws:
        return
    yield from _OTHER_SEEDS
    drawn = {each.function for each in first.draws}
    found = []
    with streams(torch.device("cpu")):
        for low in (True, False):
            if "random" in drawn:
                found.append(extreme_seed(random.seed, lambda: (random.random(), random.random()), low=low))
            if "numpy.random" in drawn:
                found.append(extreme_seed(np.random.seed, lambda: np.random.random_sample(2), low=low))
            if drawn - {"random", "numpy.random"}:
                found.append(extreme_seed(torch.default_generator.manual_seed, lambda: torch.rand(2).tolist(), low=low))
    yield from found


def check_repeats(trial: Trial, first: Outcome) -> None:
    """Refuse a step that is another each time, from one seed too: that shards differ from its whole run says nothing of them.

    Every rank must call it. It is asked where they differ alone.

    Args:
        trial: of the step.
        first: what its whole run gave.

    Communicates: what a whole run does, and one all_reduce.

    Raises:
        SequenceParallelError: with what differs between two whole runs.
    """
    moved = _moved(first, trial.whole())
    if moved:
        raise SequenceParallelError(
            f"preflight: training_step on {trial.crop} cannot be compared, since it is another each time. Whole, twice from one seed, "
            f"{_described(moved, first)}. It reads something that moves on and is not put back: a count or a random generator outside of the "
            "module, a clock, a file. Keep it in a buffer or an attribute of the module, or preflight=False trains without the check"
        )


def _moved(first: Outcome, second: Outcome) -> dict[str, float]:
    """Return what differs between two whole runs by more than rounding, and by which part of its norm; the loss under the empty name."""
    if first.loss is None or second.loss is None:
        return {}
    found = gradient_differences(first.loss.detach(), second.loss.detach(), first.gradients, second.gradients)
    return {name: each for name, each in relative_differences(found).items() if each > tolerance_of(first.dtypes)}


def _described(moved: dict[str, float], first: Outcome) -> str:
    worst = max(moved, key=lambda name: moved[name])
    return (
        f"{len(moved)} of {len(first.gradients) + 1} gradients and losses differ, most {worst or 'the loss'} by {moved[worst]:.1e} of its norm "
        f"(allowed: {tolerance_of(first.dtypes):.0e})"
    )
