"""A step on crops as later batches may be, behind the trial of its first batch: that the step is one device's there, and how groups count."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_sp.data.batch.shard_options import ShardOptions
from lightning_sp.errors import SequenceParallelError
from lightning_sp.preflight.crops.crop import Crop
from lightning_sp.preflight.crops.later_batches import try_later_batches, try_uneven_counts
from lightning_sp.preflight.explain.verdict import Agreement
from lightning_sp.preflight.failing_steps import say_not_compared
from lightning_sp.preflight.run import TrialFailedError, run_with_other_tokens
from lightning_sp.preflight.trial import Trial
from lightning_sp.step.runner import StepRunner


def try_compared(
    found: Agreement,
    crop: Crop,
    own: Crop,
    runner: StepRunner,
    options: ShardOptions,
    tried_on: Callable[[Crop, Crop], Trial],
) -> None:
    """Compare on crops as later batches may be, if the step runs on them: with tokens that it looks for, other numbers, padding."""
    if runner.context.global_view:
        return
    mesh = runner.context.mesh
    first_row = mesh.data_parallel_rank % (crop.rows // own.rows) * own.rows

    def attempt(whole: Crop, part: Crop, words: str) -> bool:
        runner.start_run()
        trial = tried_on(whole, part)
        try:
            run_with_other_tokens(replace(trial, crop=f"{trial.crop} with {words}"))
        except TrialFailedError as error:
            say_not_compared(f"not compared with {words}", error)
            return False
        return True

    try_later_batches(crop, own, first_row, found.compared, options, mesh.layout, attempt)


def try_counts(
    found: Agreement,
    crop: Crop,
    own: Crop,
    runner: StepRunner,
    options: ShardOptions,
    tried_on: Callable[[Crop, Crop], Trial],
) -> None:
    """Find out how data-parallel groups count in a loss of their own rows, by crops of which one has fewer tokens that count."""
    context, mesh = runner.context, runner.context.mesh
    is_told = context.by_counts is not None and (not context.added or context.added_is_told)
    is_open = context.has_own_terms and not is_told and not found.adds_up_rows
    if not is_open or context.counts_tried or math.isnan(found.difference) or not found.is_one_devices:
        return
    context.counts_tried = True

    def attempt(whole: Crop, part: Crop, words: str) -> bool:
        runner.start_run()
        trial = tried_on(whole, part)
        try:
            other = run_with_other_tokens(replace(trial, crop=f"{trial.crop} with {words}"))
        except SequenceParallelError as error:  # of what else such a batch has otherwise: another trial's to refuse
            rank_zero_info(f"preflight: not compared with {words}: {error}")
            return False
        if other is not None and not other.is_one_devices:
            rank_zero_warn(other.describe())
        return context.by_counts is not None and (not context.added or context.added_is_told)

    first_row = mesh.data_parallel_rank % (crop.rows // own.rows) * own.rows
    try_uneven_counts(crop, own, first_row, found.compared, options, attempt)
    if context.added and not context.added_is_told:
        _try_without_constants(tried_on(crop, own), runner)


def _try_without_constants(trial: Trial, runner: StepRunner) -> None:
    """Compare once more where one crop looks as if something was added to counts that divide the loss, and no other one tells it again.

    Raises:
        SequenceParallelError: the loss is no mean over the groups, either.
    """
    context = trial.context
    context.added, context.by_counts = {}, False
    runner.start_run()
    found = run_with_other_tokens(trial)
    if found is not None and not found.is_one_devices:
        rank_zero_warn(found.describe())
