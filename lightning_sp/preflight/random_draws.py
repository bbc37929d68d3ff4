"""A step that draws random numbers cannot be compared: it is told from one that is wrong by two whole runs, from two seeds."""

from __future__ import annotations

from lightning_sp.errors import SequenceParallelError
from lightning_sp.preflight.comparison import gradient_differences
from lightning_sp.preflight.explain.verdict import relative_differences, tolerance_of
from lightning_sp.preflight.trial import SEED, Outcome, Trial

# Draws named in a message.
_NAMED = 4


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
    second = trial.whole(seed=SEED + 1)
    if first.loss is None or second.loss is None:
        return
    found = gradient_differences(first.loss.detach(), second.loss.detach(), first.gradients, second.gradients)
    relative = relative_differences(found)
    tolerance = tolerance_of(first.dtypes)
    moved = [name for name, each in relative.items() if each > tolerance]
    if not moved:
        return
    drawn = ", ".join(each.describe() for each in first.draws[:_NAMED])
    more = f" and {len(first.draws) - _NAMED} more" if len(first.draws) > _NAMED else ""
    worst = max(moved, key=lambda name: relative[name])
    raise SequenceParallelError(
        f"preflight: training_step on {trial.crop} cannot be compared, since the step draws random numbers: {drawn}{more}. Whole, from two "
        f"seeds, {len(moved)} of {len(relative)} gradients and losses differ, most {worst or 'the loss'} by {relative[worst]:.1e} of its norm "
        f"(allowed: {tolerance:.0e}). Sharded, each rank draws its own for its own tokens: what one number decides for a whole row would differ "
        "between its ranks. Switch the draws off in training (a router's jitter, a noise on the embeddings), draw them in the data, or "
        "preflight=False trains with each rank's own, unchecked"
    )
