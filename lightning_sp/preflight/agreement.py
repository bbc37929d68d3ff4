"""How a step on shards compares with the same step whole: losses, gradients and what it leaves in buffers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_sp import comm
from lightning_sp.errors import SequenceParallelError
from lightning_sp.loss.check import LossDiffersError
from lightning_sp.parameter_names import shown
from lightning_sp.preflight.comparison import averaged, buffer_differences, gradient_differences, moved_buffers
from lightning_sp.preflight.differences import groups
from lightning_sp.preflight.differences.random_draws import check_repeats
from lightning_sp.preflight.differences.rounding import agreement_but_for_rounding, of_rounding_alone
from lightning_sp.preflight.explain.diagnosis import Finding, find_causes
from lightning_sp.preflight.explain.verdict import Agreement, Losses, judge_buffers, judge_gradients, tolerance_of
from lightning_sp.preflight.outcome import Outcome
from lightning_sp.preflight.trial import Trial


def check_alike(trial: Trial, whole: Outcome, sharded: Outcome) -> None:
    """Refuse losses that ranks of one sequence make otherwise, as each step of training is: their mean alone may be right."""
    if sharded.loss is None or not trial.context.mesh.splits_samples:
        return
    found = comm.gather_objects(
        (trial.context.mesh.data_parallel_rank, float(sharded.loss.detach())), trial.control_group
    )
    for group in {group for group, _ in found}:
        losses = [loss for each, loss in found if each == group]
        if max(losses) - min(losses) > tolerance_of(whole.dtypes) * max(map(abs, losses)):
            raise LossDiffersError(
                f"preflight: training_step on {trial.crop} has another loss on ranks that share a sequence: {losses}"
            )


@contextmanager
def eager() -> Iterator[None]:
    """Compiling for the shapes of a crop would take minutes: what is compared is the eager step."""
    with torch.compiler.set_stance("force_eager"):
        yield


def judged(trial: Trial, whole: Outcome, sharded: Outcome, started: float) -> Agreement | None:
    """Compare all that two runs gave. Each began from what the module was before the first: a counter that it moves is the same in both."""
    if (sharded.loss is None) != (whole.loss is None):
        raise SequenceParallelError(
            f"preflight: training_step returns a loss for {trial.crop} {'whole' if sharded.loss is None else 'sharded'}, but not the other way"
        )
    if sharded.loss is None or whole.loss is None:
        return None
    try:
        found = _agreement(trial, whole, sharded, started)
    except SequenceParallelError:
        rounded = agreement_but_for_rounding(trial, whole, sharded, started)
        if rounded is None:
            with eager():
                try:
                    check_repeats(trial, whole)
                except SequenceParallelError as error:
                    if not trial.context.mesh.splits_samples:
                        say_as_with_ddp(str(error), trial)
                        return None
                    raise
            raise
        found = rounded
    if not math.isnan(found.difference):
        _judge_buffers(trial, whole, sharded)
    return found


def _judge_buffers(trial: Trial, whole: Outcome, sharded: Outcome) -> None:
    """Compare what a step leaves in buffers; of whole sequences with the step on each data-parallel group's own rows, too, as DDP has it.

    Raises:
        SequenceParallelError: they differ.
    """
    tolerance, mesh = tolerance_of(whole.dtypes), trial.context.mesh
    trial.context.moved_buffers = (trial.context.moved_buffers or frozenset()) | moved_buffers(
        trial.module, sharded.buffers, trial.device
    )
    differences = buffer_differences(trial.module, whole.buffers, sharded.buffers, trial.device)
    own = {name: each for name, each in differences.items() if not each.error <= tolerance * each.scale}
    if own and mesh.data_parallel_size > 1 and mesh.layout.size == 1:
        with eager():
            of_group = groups.trial_of_groups(trial, *trial.of_group).whole()
        differences = buffer_differences(trial.module, of_group.buffers, sharded.buffers, trial.device)
        if all(each.error <= tolerance * each.scale for each in differences.values()):
            rank_zero_info(
                f"preflight: {len(own)} of {len(differences)} buffers ({shown(own)}) are made of each rank's own rows: rank 0's stand for all "
                "before the next step and in a checkpoint, as with DDP"
            )
    judge_buffers(differences, trial.crop, tolerance)


def say_as_with_ddp(why: str, trial: Trial) -> None:
    """Say that nothing was compared where nothing is split."""
    trial.context.has_own_terms = True  # perhaps: nothing tells
    rank_zero_info(f"{why}. With sequence_parallel_size=1 it trains unchecked, as with DDP")


def _agreement(trial: Trial, whole: Outcome, sharded: Outcome, started: float) -> Agreement:
    """Compare with one device on the rows of all groups; where that differs, with a loss for each group.

    Raises:
        SequenceParallelError: they differ both ways: with the numbers of the first.
    """
    find = list if trial.may_retry else partial(find_causes, trial, tolerance_of(whole.dtypes))
    if trial.context.mesh.data_parallel_size == 1 or whole.loss is None:
        return _compare(trial, whole, sharded, started, find)
    try:
        return _compare(trial, whole, sharded, started, list)
    except SequenceParallelError:
        found = _agreement_of_groups(trial, sharded, started) if groups.averages_groups(trial, whole, sharded) else None
        if found is None:
            return _compare(trial, whole, sharded, started, find)
        return groups.beside_one_device(found, trial, whole, sharded)


def _agreement_of_groups(trial: Trial, sharded: Outcome, started: float) -> Agreement | None:
    """Return how a step compares with whole sequences where each data-parallel group has a loss of its own; None where it differs."""
    apart = groups.trial_of_groups(trial, *trial.of_group)
    try:
        with eager():
            whole = apart.whole()
    except SequenceParallelError:
        return None
    try:
        return None if whole.loss is None else _compare(trial, whole, sharded, started, list)
    except SequenceParallelError:
        return of_rounding_alone(apart, whole, sharded, started)


def _compare(
    trial: Trial, whole: Outcome, sharded: Outcome, started: float, find: Callable[[], Sequence[Finding]]
) -> Agreement:
    """Compare the losses and gradients that a step gave whole and on shards."""
    assert whole.loss is not None
    assert sharded.loss is not None
    tolerance = tolerance_of(whole.dtypes)
    # Of one device it is the same on all ranks; of groups apart their mean.
    reference = averaged(whole.loss)
    loss = reference if sharded.by_counts else averaged(sharded.loss)
    found = gradient_differences(reference, loss, whole.gradients, sharded.gradients)
    losses = Losses(whole=float(reference), sharded=float(loss))
    largest = judge_gradients(trial.module, found, losses, trial.crop, tolerance, find)
    return Agreement(
        crop=trial.crop,
        loss=losses.whole,
        difference=largest.difference,
        worst=largest.name,
        tolerance=tolerance,
        seconds=time.perf_counter() - started,
        has_gradients=any(each.scale > 0 for name, each in found.items() if name),
        compared=whole.read.compared,
    )
