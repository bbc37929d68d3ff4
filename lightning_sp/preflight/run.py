"""A step whole and the same step sharded, forward and backward, and the verdict on both.

Whole is the batch that one device would train on, the rows of all data-parallel groups; sharded is a step of training.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection
from dataclasses import replace

import torch

from lightning_sp import comm
from lightning_sp.errors import SequenceParallelError
from lightning_sp.loss.check import LossDiffersError, OfSplitWeightsError
from lightning_sp.parallelize import write_counts
from lightning_sp.preflight.agreement import check_alike, eager, judged, say_as_with_ddp
from lightning_sp.preflight.differences import groups
from lightning_sp.preflight.differences.counted_groups import settled
from lightning_sp.preflight.differences.decisions import check_read_numbers
from lightning_sp.preflight.differences.hidden_branches import (
    HidingWeights,
    first_names,
    hiding_weights,
    with_small_numbers,
)
from lightning_sp.preflight.differences.large_gradients import Backwards, check_large_gradients
from lightning_sp.preflight.differences.later_steps import compare_at_later_steps
from lightning_sp.preflight.differences.other_outcomes import compare_with_other_outcomes
from lightning_sp.preflight.differences.other_seeds import (
    EXTREMES,
    OTHER_SEEDS,
    drawn_from_seed,
    noting_random_generators,
)
from lightning_sp.preflight.differences.other_tokens import modules_of_training
from lightning_sp.preflight.differences.random_draws import check_random_draws, random_step
from lightning_sp.preflight.differences.second_step import second_step
from lightning_sp.preflight.explain.diagnosis import find_causes
from lightning_sp.preflight.explain.verdict import (
    TOLERANCES,
    Agreement,
    listed,
    tolerance_of,
)
from lightning_sp.preflight.failing_steps import say_not_compared
from lightning_sp.preflight.moved_weights import parametrizations_unwritten, refuse_writes
from lightning_sp.preflight.outcome import Outcome
from lightning_sp.preflight.recording.checked_indices import CheckedIndices
from lightning_sp.preflight.recording.hidden_terms import common_terms
from lightning_sp.preflight.recording.progress_read import progress_read
from lightning_sp.preflight.training_numbers import compare_training_numbers
from lightning_sp.preflight.trial import Trial
from lightning_sp.step.users_numbers.results import NumbersOfHooks


class TrialFailedError(SequenceParallelError):
    """A step does not run whole on a crop: nothing is known of what shards would make of it."""


def run_preflight(
    trial: Trial,
    monitored: Collection[str] | None,
    read_padding: Callable[[], None],
    of_hooks: NumbersOfHooks,
) -> Agreement | None:
    """Run a step whole and sharded, forward and backward, and compare. Every rank must call it with the same samples.

    Args:
        trial: of the step.
        monitored: names of logged numbers that decide about the run; None compares those alone of which nothing is decided yet.
        read_padding: refuses a step that fails on padding, on all ranks together; called once the step has run whole.
        of_hooks: what hooks have left of the user's numbers, to be shown as later in the run.

    Communicates: what two steps do, and one all_reduce of two float64 numbers for each parameter and buffer.

    Returns:
        What was found; None where the step returned no loss.

    Raises:
        SequenceParallelError: they differ or cannot be compared.
        TrialFailedError: the step does not run whole on the crop: nothing can be said.
    """
    started, counts = time.perf_counter(), write_counts(trial.module)
    with eager():
        draws, backwards = list[bool](), Backwards(trial.module)
        with progress_read(trial.module, of_hooks) as read, parametrizations_unwritten():
            noting = backwards.noting(read.noting(trial.run_whole, trial.module.trainer))
            whole = _run_whole(replace(trial, run_whole=noting_random_generators(noting, trial.module, draws)))
        refuse_writes(counts, write_counts(trial.module))
        read_padding()
        if trial.context.global_view and trial.context.mesh.layout.size > 1:
            if trial.context.mesh.data_parallel_size > 1 and random_step(trial, whole) is not None:
                trial = groups.trial_of_groups(trial, *trial.of_group)  # each group draws for its own rows
                whole = _run_whole(trial)
        elif trial.context.mesh.splits_samples:
            check_random_draws(trial, whole)
        elif told := random_step(trial, whole):
            say_as_with_ddp(told, trial)
            return None
        # In the global view tensors say themselves whose tokens they have.
        others = None if trial.context.global_view else modules_of_training(trial, whole)
        trial.context.unsharded.set(*(others or (None,)))
        sharded = settled(trial, whole, _run_sharded(trial, whole))
    check_alike(trial, whole, sharded)
    found = judged(trial, whole, sharded, started)
    trial.learn_outputs(whole, sharded)
    if found is not None and not math.isnan(found.difference):
        _look_at_decisions(trial, whole, sharded, backwards)
        _run_with_small_numbers(trial, weights := hiding_weights(trial.module, whole.gradients))
        _run_with_terms_shown(trial, whole, sharded, weights)
        compare_with_other_outcomes(trial, whole, sharded, _compare_if_it_runs)
        if monitored is not None or trial.context.undecided_numbers:
            with eager():
                compare_training_numbers(trial, whole, sharded, monitored or (), undecided=monitored is None)
        compare_at_later_steps(trial, whole, read if monitored is not None else read.without_reads(of_hooks), _as_later)
        of_hooks.lines.update(read.alike.lines)
        _run_a_second_step(trial, sharded)
        _run_with_other_draws(trial, any(draws))
    return found


def run_with_other_tokens(trial: Trial) -> Agreement | None:
    """Compare a step on tokens that its batches may hold later; a refusal of these, by what this package cannot carry, says nothing of them.

    Raises:
        SequenceParallelError: they differ; `TrialFailedError` where the step does not run on them.
    """
    started = time.perf_counter()
    with eager():
        with CheckedIndices():  # they may be indices
            whole = _run_whole(trial)
        try:
            sharded = settled(trial, whole, trial.sharded())
        except SequenceParallelError as error:
            raise error if isinstance(error, LossDiffersError) else TrialFailedError(str(error)) from error
    check_alike(trial, whole, sharded)
    return judged(trial, whole, sharded, started)


def run_longer(trial: Trial) -> Agreement | None:
    """Run a step on a longer crop of this rank's group, after `run_preflight`, and compare. As that.

    Raises:
        TrialFailedError: the step does not run whole on it: nothing can be said.
    """
    return _compare_again(trial)


def _run_whole(trial: Trial) -> Outcome:
    try:
        return trial.whole()
    except SequenceParallelError as error:
        raise TrialFailedError(str(error)) from error


def _run_sharded(trial: Trial, whole: Outcome) -> Outcome:
    """Run the step on shards; where its loss differs between ranks of one sequence, say what makes it."""
    try:
        return trial.sharded()
    except LossDiffersError as error:
        of_weights = isinstance(error, OfSplitWeightsError)  # whose calls differ in every split layer
        findings = [] if trial.may_retry or of_weights else find_causes(trial, tolerance_of(whole.dtypes))
        if not findings:
            raise
        raise LossDiffersError(f"{error}. Found on the crop: {listed(findings)}") from error


def _look_at_decisions(trial: Trial, whole: Outcome, sharded: Outcome, backwards: Backwards) -> None:
    """Refuse a step that decides by a number of its part of the batch, or its backward by one of a part's gradient."""
    with eager():
        check_read_numbers(trial, whole, sharded)
        check_large_gradients(trial, whole, backwards.functions)


def _run_with_small_numbers(trial: Trial, weights: HidingWeights) -> None:
    """Compare once more what weights that begin at zero, or as copies, have hidden, if there are any."""
    if not weights:
        return
    again = replace(trial, crop=f"{trial.crop} with small numbers in {weights.describe()},")
    started = time.perf_counter()
    with with_small_numbers(weights):
        with eager():
            shown, sharded = again.whole(), again.sharded()
        check_alike(again, shown, sharded)
        judged(again, shown, sharded, started)


def _run_with_terms_shown(trial: Trial, whole: Outcome, sharded: Outcome, weights: HidingWeights) -> None:
    """Compare once more what calls have hidden, if any have in both runs: a term of the loss times 0, say. Every rank must call it.

    Args:
        trial: of the step.
        whole: what it gave whole.
        sharded: what it gave on shards.
        weights: that hide others.
    """
    exact = tolerance_of(whole.dtypes) <= TOLERANCES[torch.float64]
    own = common_terms([whole.hidden, sharded.hidden], exact=exact)
    terms = common_terms(comm.gather_objects(own, trial.control_group), exact=exact)
    if not terms:
        return
    named = first_names([call.describe() for call in terms])
    again = replace(trial, crop=f"{trial.crop}, with what {named} hides shown,", shown=terms)
    with with_small_numbers(weights):
        try:
            _compare_again(again)
        except TrialFailedError as error:
            say_not_compared(f"not compared with what {named} hides", error)
        except SequenceParallelError as error:
            raise SequenceParallelError(
                f"{error}. A term that counts for nothing now (a weight of 0, a branch that is not chosen, a clamp with no slope), or for "
                "little, would be wrong once it counts; if it never will, leave it out: `if weight: loss = loss + weight * term`"
            ) from error


def _run_a_second_step(trial: Trial, sharded: Outcome) -> None:
    """Compare once more what a second step makes of tensors that the first one leaves, if any rank's does. Every rank must call it."""
    if (again := second_step(trial, sharded)) is not None:
        _compare_if_it_runs(again)


def _run_with_other_draws(trial: Trial, draws: bool) -> None:
    """Compare once more what the step's own generators draw from other seeds, if any rank's draw. Every rank must call it.

    Args:
        trial: of the step.
        draws: whether this rank's do.
    """
    for seed in (*OTHER_SEEDS, *EXTREMES) if any(comm.gather_objects(draws, trial.control_group)) else ():
        with drawn_from_seed(trial.module, seed):
            _compare_if_it_runs(replace(trial, crop=f"{trial.crop} with other draws of the step's own generators,"))


def _compare_if_it_runs(again: Trial) -> bool:
    try:
        _compare_again(again)
        return True
    except TrialFailedError as error:
        say_not_compared(f"{again.crop.rstrip(',')} is not compared", error)
        return False


def _as_later(again: Trial, *, says: bool = True) -> bool:
    """Compare what is shown as later in the run: a number may be an index then, too, or decide about others. As `Compare` has it."""
    started = time.perf_counter()
    try:
        with eager():
            with CheckedIndices():
                whole = _run_whole(again)
            sharded = again.sharded()
        check_alike(again, whole, sharded)
        if judged(again, whole, sharded, started) is not None:
            with eager():
                check_read_numbers(again, whole, sharded)
        return True
    except TrialFailedError as error:
        if says:
            say_not_compared(f"{again.crop.rstrip(',')} is not compared", error)
        return False


def _compare_again(again: Trial) -> Agreement | None:
    started = time.perf_counter()
    with eager():
        whole, sharded = _run_whole(again), again.sharded()
    check_alike(again, whole, sharded)
    return judged(again, whole, sharded, started)
