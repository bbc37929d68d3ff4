"""A step whole and the same step sharded, forward and backward, and the verdict on both.

Whole is the batch that one device would train on, the rows of all data-parallel groups; sharded is a step of training.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_sp import comm
from lightning_sp.errors import SequenceParallelError
from lightning_sp.loss.check import LossDiffersError
from lightning_sp.parallelize import write_counts
from lightning_sp.parameter_names import shown
from lightning_sp.preflight.comparison import averaged, buffer_differences, gradient_differences, moved_buffers
from lightning_sp.preflight.differences import groups
from lightning_sp.preflight.differences.counted_groups import settled
from lightning_sp.preflight.differences.decisions import check_read_numbers
from lightning_sp.preflight.differences.hidden_branches import (
    HidingWeights,
    first_names,
    hiding_weights,
    with_small_numbers,
)
from lightning_sp.preflight.differences.later_steps import compare_at_later_steps
from lightning_sp.preflight.differences.other_outcomes import compare_with_other_outcomes
from lightning_sp.preflight.differences.other_seeds import (
    EXTREMES,
    OTHER_SEEDS,
    drawn_from_seed,
    noting_random_generators,
)
from lightning_sp.preflight.differences.other_tokens import modules_of_training
from lightning_sp.preflight.differences.random_draws import check_random_draws, check_repeats, random_step
from lightning_sp.preflight.differences.rounding import agreement_but_for_rounding, of_rounding_alone
from lightning_sp.preflight.differences.second_step import second_step
from lightning_sp.preflight.explain.diagnosis import Finding, find_causes
from lightning_sp.preflight.explain.verdict import (
    TOLERANCES,
    Agreement,
    Losses,
    judge_buffers,
    judge_gradients,
    listed,
    tolerance_of,
)
from lightning_sp.preflight.moved_weights import parametrizations_unwritten, refuse_writes
from lightning_sp.preflight.outcome import Outcome
from lightning_sp.preflight.recording.checked_indices import CheckedIndices
from lightning_sp.preflight.recording.hidden_terms import common_terms
from lightning_sp.preflight.recording.progress_read import progress_read
from lightning_sp.preflight.training_numbers import compare_training_numbers
from lightning_sp.preflight.trial import Trial
from lightning_sp.step.users_numbers.counters import Counter


class TrialFailedError(SequenceParallelError):
    """A step does not run whole on a crop: nothing is known of what shards would make of it."""


def run_preflight(
    trial: Trial,
    monitored: Collection[str] | None = None,
    read_padding: Callable[[], None] = lambda: None,
    counters: Sequence[Counter] = (),
) -> Agreement | None:
    """Run a step whole and sharded, forward and backward, and compare. Every rank must call it with the same samples.

    Args:
        trial: of the step.
        monitored: names of logged numbers that decide about the run; None compares no numbers that are logged.
        read_padding: refuses a step that fails on padding, on all ranks together; called once the step has run whole.
        counters: the user's numbers that have counted batches, to be shown as later in the run.

    Communicates: what two steps do, and one all_reduce of two float64 numbers for each parameter and buffer.

    Returns:
        What was found; None where the step returned no loss.

    Raises:
        SequenceParallelError: they differ or cannot be compared.
        TrialFailedError: the step does not run whole on the crop: nothing can be said.
    """
    started, counts = time.perf_counter(), write_counts(trial.module)
    with _eager():
        draws = list[bool]()
        with progress_read(trial.module, counters) as read, parametrizations_unwritten():
            noting = read.noting(trial.run_whole, trial.module.trainer)
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
            _say_as_with_ddp(told, trial)
            return None
        # In the global view tensors say themselves whose tokens they have.
        others = None if trial.context.global_view else modules_of_training(trial, whole)
        trial.context.unsharded.set(*(others or (None,)))
        sharded = settled(trial, whole, _run_sharded(trial, whole))
    _check_alike(trial, whole, sharded)
    found = _judged(trial, whole, sharded, started)
    trial.learn_outputs(whole, sharded)
    if found is not None and not math.isnan(found.difference):
        with _eager():
            check_read_numbers(trial, whole, sharded)
        _run_with_small_numbers(trial, weights := hiding_weights(trial.module, whole.gradients))
        _run_with_terms_shown(trial, whole, sharded, weights)
        compare_with_other_outcomes(trial, whole, sharded, _compare_if_it_runs)
        if monitored is not None:
            with _eager():
                compare_training_numbers(trial, whole, sharded, monitored)
        compare_at_later_steps(trial, whole, read if monitored is not None else read.without_reads(counters), _as_later)
        _run_a_second_step(trial, sharded)
        _run_with_other_draws(trial, any(draws))
    return found


def run_with_other_tokens(trial: Trial) -> Agreement | None:
    """Compare a step on tokens that its batches may hold later; a refusal of these, by what this package cannot carry, says nothing of them.

    Raises:
        SequenceParallelError: they differ; `TrialFailedError` where the step does not run on them.
    """
    started = time.perf_counter()
    with _eager():
        with CheckedIndices():  # they may be indices
            whole = _run_whole(trial)
        try:
            sharded = settled(trial, whole, trial.sharded())
        except SequenceParallelError as error:
            raise error if isinstance(error, LossDiffersError) else TrialFailedError(str(error)) from error
    _check_alike(trial, whole, sharded)
    return _judged(trial, whole, sharded, started)


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
        findings = [] if trial.may_retry else find_causes(trial, tolerance_of(whole.dtypes))
        if not findings:
            raise
        raise LossDiffersError(f"{error}. Found on the crop: {listed(findings)}") from error


def _run_with_small_numbers(trial: Trial, weights: HidingWeights) -> None:
    """Compare once more what weights that begin at zero, or as copies, have hidden, if there are any."""
    if not weights:
        return
    again = replace(trial, crop=f"{trial.crop} with small numbers in {weights.describe()},")
    started = time.perf_counter()
    with with_small_numbers(weights):
        with _eager():
            shown, sharded = again.whole(), again.sharded()
        _check_alike(again, shown, sharded)
        _judged(again, shown, sharded, started)


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
            rank_zero_info(f"preflight: not compared with what {named} hides: {error}")
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
        rank_zero_info(f"preflight: {again.crop.rstrip(',')} is not compared: {error}")
        return False


def _as_later(again: Trial) -> None:
    """Compare what is shown as later in the run: a number may be an index then, too, or decide about others."""
    started = time.perf_counter()
    try:
        with _eager():
            with CheckedIndices():
                whole = _run_whole(again)
            sharded = again.sharded()
        _check_alike(again, whole, sharded)
        if _judged(again, whole, sharded, started) is not None:
            with _eager():
                check_read_numbers(again, whole, sharded)
    except TrialFailedError as error:
        rank_zero_info(f"preflight: {again.crop.rstrip(',')} is not compared: {error}")


def _compare_again(again: Trial) -> Agreement | None:
    started = time.perf_counter()
    with _eager():
        whole, sharded = _run_whole(again), again.sharded()
    _check_alike(again, whole, sharded)
    return _judged(again, whole, sharded, started)


def _check_alike(trial: Trial, whole: Outcome, sharded: Outcome) -> None:
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
def _eager() -> Iterator[None]:
    """Compiling for the shapes of a crop would take minutes: what is compared is the eager step."""
    with torch.compiler.set_stance("force_eager"):
        yield


def _judged(trial: Trial, whole: Outcome, sharded: Outcome, started: float) -> Agreement | None:
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
            with _eager():
                try:
                    check_repeats(trial, whole)
                except SequenceParallelError as error:
                    if not trial.context.mesh.splits_samples:
                        _say_as_with_ddp(str(error), trial)
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
        with _eager():
            of_group = groups.trial_of_groups(trial, *trial.of_group).whole()
        differences = buffer_differences(trial.module, of_group.buffers, sharded.buffers, trial.device)
        if all(each.error <= tolerance * each.scale for each in differences.values()):
            rank_zero_info(
                f"preflight: {len(own)} of {len(differences)} buffers ({shown(own)}) are made of each rank's own rows: rank 0's stand for all "
                "before the next step and in a checkpoint, as with DDP"
            )
    judge_buffers(differences, trial.crop, tolerance)


def _say_as_with_ddp(why: str, trial: Trial) -> None:
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
        with _eager():
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
