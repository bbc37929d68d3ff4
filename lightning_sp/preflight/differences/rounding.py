"""A difference that rounding alone makes: under autocast the same step in float32 tells it from a fault.

    accepted   in float32 both runs agree as float32 must, and under autocast at most a tenth of the gradients differ by more than is allowed,
               none by more than three times as much; or they differ by no more than three times what one device's own step does where its
               weights move by half a rounding

A router sends a token to another expert, which changes all gradients of two experts. A neuron whose input is nearly 0 is on in one run and
off in the other. Both change a few gradients by far more than rounding does. A kernel that is wrong in bfloat16 alone would change most.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch

from lightning_sp import comm
from lightning_sp.errors import SequenceParallelError
from lightning_sp.preflight.comparison import Difference, averaged, gradient_differences
from lightning_sp.preflight.explain.verdict import (
    Agreement,
    Losses,
    judge_gradients,
    relative_differences,
    tolerance_of,
)
from lightning_sp.preflight.moved_weights import moved_weights, shard_of
from lightning_sp.preflight.outcome import Outcome
from lightning_sp.preflight.trial import Trial

# Of what is allowed, and of the gradients.
_LARGEST, _PART = 3.0, 0.1
# One device's own runs with moved weights, at most: a token of which a router is least sure went elsewhere in 2 or 3 of 12 (Mistral 4).
_MOVED_RUNS = 16
# Of bfloat16's 8 significant bits half the last.
_HALF_ROUNDING = 2.0**-9
# So many roundings of 1 are nothing.
_ROUNDINGS = 100.0


def agreement_but_for_rounding(trial: Trial, whole: Outcome, sharded: Outcome, started: float) -> Agreement | None:
    """Return how both runs agree in float32, where they differ under autocast by no more than rounding; else None. Every rank must call it.

    Args:
        trial: of the step.
        whole: what it gave whole, under autocast.
        sharded: what it gave on shards.
        started: when the preflight began, of `time.perf_counter`.
    """
    if whole.loss is None or sharded.loss is None:
        return None
    if trial.in_float32 is None:
        return of_rounding_alone(trial, whole, sharded, started)
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
    few = relative[""] <= allowed and all(each <= _LARGEST * allowed for each in beyond)
    if not (few and len(beyond) <= _PART * len(relative)) and not _is_of_one_device(trial, whole, relative, allowed):
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


def of_rounding_alone(trial: Trial, whole: Outcome, sharded: Outcome, started: float) -> Agreement | None:
    """Return that nothing was shown, where gradients are what rounding leaves of 0; else None. Every rank must call it."""
    assert whole.loss is not None
    found, losses = _differences(whole, sharded)
    tolerance, rounding = tolerance_of(whole.dtypes), max(torch.finfo(dtype).eps for dtype in whole.dtypes)
    shards = [shard_of(each).double() for each in trial.module.parameters() if each.is_floating_point()]
    weights = comm.reduce_sum(torch.stack([each.square().sum() for each in shards]).sum())
    gradients = sum(each.scale**2 + each.error**2 for name, each in found.items() if name)
    if not gradients * float(weights) <= (_ROUNDINGS * rounding) ** 2:
        return None
    beyond = [name for name, each in relative_differences(found).items() if not each <= tolerance]
    largest = dict.fromkeys(beyond, 0.0)
    for seed in range(_MOVED_RUNS):
        with moved_weights(trial.module, seed, 2 * rounding), torch.compiler.set_stance("force_eager"):
            own = _differences(whole, trial.whole())[0]
        largest = {name: max(each, own[name].error) for name, each in largest.items()}
        # By half of itself: no digit of it is right.
        if all(found[name].scale <= 2 * each for name, each in largest.items()):
            return Agreement(
                crop=f"{trial.crop}, whose gradients are rounding alone",
                loss=losses.whole,
                difference=0.0,
                worst="none",
                tolerance=tolerance,
                seconds=time.perf_counter() - started,
                has_gradients=False,
            )
    return None


def _is_of_one_device(trial: Trial, whole: Outcome, relative: Mapping[str, float], allowed: float) -> bool:
    """Return whether one device's own step differs as much where its weights move by half a rounding of bfloat16. Every rank must call it.

    The largest difference is held against the largest of one device, the second against the second, and so on: a router sends few tokens
    elsewhere, a wrong kernel changes most gradients.
    """
    found = [relative[""], *_sorted(relative)]
    largest = [0.0] * len(found)
    for seed in range(_MOVED_RUNS):
        with moved_weights(trial.module, seed, _HALF_ROUNDING), torch.compiler.set_stance("force_eager"):
            own = relative_differences(_differences(whole, trial.whole())[0])
        largest = [max(pair) for pair in zip(largest, [own[""], *_sorted(own)], strict=True)]
        if all(each <= max(allowed, _LARGEST * of_one) for each, of_one in zip(found, largest, strict=True)):
            return True
    return False


def _sorted(relative: Mapping[str, float]) -> list[float]:
    return sorted((each for name, each in relative.items() if name), reverse=True)


def _differences(whole: Outcome, sharded: Outcome) -> tuple[dict[str, Difference], Losses]:
    assert whole.loss is not None
    assert sharded.loss is not None
    reference, loss = averaged(whole.loss), averaged(sharded.loss)
    found = gradient_differences(reference, loss, whole.gradients, sharded.gradients)
    return found, Losses(float(reference), float(loss))
