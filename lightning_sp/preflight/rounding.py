"""A difference that rounding alone makes: under autocast the same step in float32 tells it from a fault.

    accepted   in float32 both runs agree as float32 must, and under autocast at most a tenth of the gradients differ by more than is allowed,
               none by more than three times as much

A neuron whose input is nearly 0 is on in one run and off in the other, which changes a few gradients by far more than rounding does. A kernel
that is wrong in bfloat16 alone would change most.
"""

from __future__ import annotations

import time

import torch

from lightning_sp.errors import SequenceParallelError
from lightning_sp.preflight.comparison import Difference, averaged, gradient_differences
from lightning_sp.preflight.explain.verdict import (
    Agreement,
    Losses,
    judge_gradients,
    relative_differences,
    tolerance_of,
)
from lightning_sp.preflight.trial import Outcome, Trial

# Of what is allowed, and of the gradients.
_LARGEST, _PART = 3.0, 0.1


def agreement_but_for_rounding(trial: Trial, whole: Outcome, sharded: Outcome, started: float) -> Agreement | None:
    """Return how both runs agree in float32, where they differ under autocast by no more than rounding; else None. Every rank must call it.

    Args:
        trial: of the step.
        whole: what it gave whole, under autocast.
        sharded: what it gave on shards.
        started: when the preflight began, of `time.perf_counter`.
    """
    if trial.in_float32 is None or whole.loss is None or sharded.loss is None:
        return None
    with trial.in_float32(), torch.compiler.set_stance("force_eager"):
        precise, precise_sharded = trial.whole(), trial.sharded()
    if precise.loss is None or precise_sharded.loss is None:
        return None
    found, losses = _differences(precise, precise_sharded)
    tolerance = tolerance_of(precise.dtypes)
    try:
        largest = judge_gradients(trial.module, found, losses, trial.crop, tolerance, list)
    except SequenceParallelError:
        return None
    # Both runs under autocast.
    between, _ = _differences(whole, sharded)
    relative, allowed = relative_differences(between), tolerance_of(whole.dtypes)
    beyond = [each for name, each in relative.items() if name and not each <= allowed]
    if (
        not relative[""] <= allowed
        or not all(each <= _LARGEST * allowed for each in beyond)
        or len(beyond) > _PART * len(relative)
    ):
        return None
    differ = f"{len(beyond)} of {len(relative) - 1} gradients differ by up to {max(beyond, default=0.0):.1e}"
    return Agreement(
        crop=f"{trial.crop} in float32 (under autocast {differ})",
        loss=losses.whole,
        difference=largest.difference,
        worst=largest.name,
        tolerance=tolerance,
        seconds=time.perf_counter() - started,
    )


def _differences(whole: Outcome, sharded: Outcome) -> tuple[dict[str, Difference], Losses]:
    assert whole.loss is not None
    assert sharded.loss is not None
    reference, loss = averaged(whole.loss), averaged(sharded.loss)
    found = gradient_differences(reference, loss, whole.gradients, sharded.gradients)
    return found, Losses(float(reference), float(loss))
