"""The preflight on a run's first batch: a crop of it through the user's own training_step, whole and sharded."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Set
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_sp import comm
from lightning_sp.config import StrategyConfig
from lightning_sp.data.batch.contents.entries import (
    STANDARD_NAMES,
    batch_entries,
    inferred_dims,
    is_no_structure,
    named_dims,
    sequence_in_last_dim,
)
from lightning_sp.data.batch.contents.without_sequence import holds_rows_alone
from lightning_sp.data.batch.shard_options import ShardOptions
from lightning_sp.data.batch.sharded_batch import is_sharded
from lightning_sp.errors import SequenceParallelError
from lightning_sp.loss.check import LossDiffersError
from lightning_sp.parallelize import run_with_whole_parameters
from lightning_sp.preflight.batches.shown_batches import try_compared, try_counts
from lightning_sp.preflight.comparison import has_16_bit_weights
from lightning_sp.preflight.crops.both_runs import both_runs, untouched_run
from lightning_sp.preflight.crops.crop import Crop, is_uneven, uneven_tokens, whole_extent
from lightning_sp.preflight.crops.shared_crop import crops_of
from lightning_sp.preflight.crops.shorter import RunStep, shorter_run, shorter_run_of_text
from lightning_sp.preflight.differences.groups import trial_of_groups
from lightning_sp.preflight.explain.verdict import Agreement
from lightning_sp.preflight.indices.padding import check_padding_read
from lightning_sp.preflight.indices.part_indices import check_part_indices
from lightning_sp.preflight.lengths.larger_crops import LARGER, checkpoints, compared_on_crops
from lightning_sp.preflight.lengths.untried_length import check_untried_length
from lightning_sp.preflight.run import TrialFailedError, run_longer, run_preflight
from lightning_sp.preflight.trial import Trial
from lightning_sp.step.runner import StepRunner
from lightning_sp.step.users_numbers.results import NumbersOfHooks


class TriedBatch(NamedTuple):
    """What a trial of a batch has shown.

    Args:
        inferred: the entries that were split by their shapes alone, along which dim.
        has_targets: False where all of the batch's are ignored, so that nothing was compared.
        seen_tokens: of the longest whole batch whose step was run by shapes; None where no length can change what a step calls.
        whole: the entries of other lengths, which a later sequence may have by chance.
        cuts_alike: whether it is of no matter where sequences are cut: pieces were compared that no group of neighbouring tokens fills.
    """

    inferred: dict[str, int]
    has_targets: bool = True
    seen_tokens: int | None = None
    cuts_alike: bool = False
    whole: Set[str] = frozenset()


def try_first_batch(
    batch: Any,
    runner: StepRunner,
    run: RunStep,
    *,
    config: StrategyConfig,
    options: ShardOptions,
    monitored: Collection[str],
    in_float32: Callable[[], AbstractContextManager[None]] | None = None,
    after: int = 0,
    may_retry: bool = False,
    of_hooks: NumbersOfHooks,
    seen_tokens: int | None = None,
    cut_is_untried: bool = False,
    with_numbers: bool = False,
) -> TriedBatch:
    """Compare training_step on a crop of the batch, whole and sharded; it leaves no trace. Every rank must call it.

    Args:
        batch: as the loader gave it.
        runner: of the model's steps.
        run: the user's training_step on a batch.
        config: how long a crop is wanted, and whether batches are sharded by hand.
        options: which tensors carry the sequence.
        monitored: names of logged numbers that decide about the run.
        in_float32: switches autocast off; None where there is none.
        after: optimizer steps of this fit so far; then a short crop is enough.
        may_retry: a refusal is not the last word, for the global view is tried then: as `Trial` has it.
        of_hooks: what hooks have left of the user's numbers, not yet tried as later in the run.
        seen_tokens: as `TriedBatch` had it before.
        cut_is_untried: a batch of this rank is cut at other places than those that were tried.
        with_numbers: what the step logs is compared after steps, too: it may have logged what none before did.

    Raises:
        SequenceParallelError: they differ, or the step cannot run on a crop; nothing was compared, and entries were split by their shapes.
    """
    if why := _why_not(batch, runner, options):
        if not after:
            rank_zero_info(f"preflight: skipped, for {why}")
        return TriedBatch({}, cuts_alike=True, whole=options.whole_entries)
    inferred = _inferred(batch, options)
    shown = monitored if with_numbers or not after else None
    trial = partial(_compare, batch, runner, run, config, options, in_float32, shown)
    try:
        found, tried = trial(
            after=after, may_retry=may_retry, of_hooks=of_hooks, seen_tokens=seen_tokens, cut_is_untried=cut_is_untried
        )
    except SequenceParallelError as error:
        # Of a refusal that is the last word.
        if inferred and not may_retry and (line := _other_dims(batch, inferred, options)):
            error.args = (f"{error}\n{line}",)
        raise
    if runner.context.mesh.layout.size > 1:
        _check_inferred(inferred, compared=found is not None and not math.isnan(found.difference))
    return tried._replace(inferred=inferred, whole=_of_other_lengths(batch, options, inferred) | options.whole_entries)


def _compare(
    batch: Any,
    runner: StepRunner,
    run: RunStep,
    config: StrategyConfig,
    options: ShardOptions,
    in_float32: Callable[[], AbstractContextManager[None]] | None,
    monitored: Collection[str] | None,
    *,
    after: int,
    may_retry: bool,
    of_hooks: NumbersOfHooks,
    seen_tokens: int | None,
    cut_is_untried: bool,
) -> tuple[Agreement | None, TriedBatch]:
    """Return what was found, None where nothing was, and what is now seen of the batch, but for entries that were split by their shapes."""
    runner.end_run()
    wanted = None if config.preflight_tokens == "auto" else config.preflight_tokens
    cut = crops_of(batch, runner, config, options)
    crop, own = cut(wanted=wanted)
    if crop.num_targets == 0:
        rank_zero_warn(_without_targets(after))
        return None, TriedBatch({}, has_targets=False, seen_tokens=seen_tokens)

    def tried_on(crop: Crop, own: Crop) -> Trial:
        return replace(_trial(crop, own, runner, run, options, in_float32), may_retry=may_retry)

    def compared(crop: Crop, own: Crop) -> Agreement | None:
        read = partial(_read_ahead, crop, options, runner, run, tries_global_view=config.tries_global_view)
        return _run(tried_on(crop, own), after, read, of_hooks, monitored)

    try:
        larger = [] if wanted else [partial(each, batch, cut, options, config) for each in LARGER]
        found, (crop, of_group) = compared_on_crops(compared, (crop, own), larger, runner)
        if found is not None:  # what is not one device's is no matter of course, though DDP does it too
            (rank_zero_info if found.is_one_devices else rank_zero_warn)(found.describe())
            try_counts(found, crop, of_group, runner, options, tried_on)
        layout = runner.context.mesh.layout
        if found is None or math.isnan(found.difference) or wanted is not None or layout.size == 1:
            return found, TriedBatch({}, True, seen_tokens, cuts_alike=wanted is not None or layout.size == 1)
        tried, alike = (crop.tokens, seen_tokens or 0), is_uneven(crop.tokens, layout)
        if not after:
            try_compared(found, crop, of_group, runner, options, tried_on)
            long, own = cut(wanted=None, longer=True, checkpointed=checkpoints(config))
            tried = crop.tokens, long.tokens
            if long.tokens > crop.tokens and long.num_targets != 0:
                runner.start_run()
                alike |= _try_longer(tried_on(long, own), own) and is_uneven(long.tokens, layout)
        alike = alike or (after > 0 and _try_uneven(batch, cut, runner, options, tried_on, is_due=cut_is_untried))
        if _may_run_by_shapes(runner, config) and (not after or seen_tokens is not None):
            check_untried_length(batch, own, runner, run, options, tried)
            seen_tokens = max(seen_tokens or 0, *whole_extent(batch, options)[1:])
        return found, TriedBatch({}, True, seen_tokens, alike)
    except TrialFailedError as error:
        if not after:
            raise
        rank_zero_info(f"preflight: not compared after {after} optimizer steps: {error}")
        return None, TriedBatch({}, True, seen_tokens)
    finally:
        runner.start_run()


def _without_targets(after: int) -> str:
    which = f"batch after {after} optimizer steps" if after else "first batch"
    return f"preflight: not possible, for every target of the {which} is ignored: nothing was compared; a later one will be"


def _try_uneven(
    batch: Any,
    cut: Callable[..., tuple[Crop, Crop]],
    runner: StepRunner,
    options: ShardOptions,
    trial: Callable[[Crop, Crop], Trial],
    *,
    is_due: bool,
) -> bool:
    """Compare at a length whose pieces cut groups of neighbouring tokens, if any rank has such a batch; return whether that was done.

    Where the step fails there, whole, it is compared at one that is cut as this batch is.
    """
    layout, world = runner.context.mesh.layout, runner.groups.world
    of_ranks = comm.gather_objects((is_due, max(whole_extent(batch, options)[1:])), world)
    if not any(due for due, _ in of_ranks):
        return False
    least = min(tokens for _, tokens in of_ranks)
    for wanted in ({"wanted": uneven_tokens(least, layout)}, {"wanted": None, "longer": True}):
        crop, own = cut(**wanted)
        if crop.num_targets == 0:
            continue
        runner.start_run()
        if _try_longer(trial(crop, own), own):
            return "longer" not in wanted
    return False


def _may_run_by_shapes(runner: StepRunner, config: StrategyConfig) -> bool:
    """Return whether the length of a step's input may decide what it calls: in the global view it is the whole length. Alike on all ranks."""
    module: Any = runner.module
    return (
        not runner.context.global_view
        and config.shard_batch
        and config.tensor_parallel_size == 1
        and module.automatic_optimization
    )


def _read_ahead(
    crop: Crop, options: ShardOptions, runner: StepRunner, run: RunStep, *, tries_global_view: bool
) -> None:
    """Refuse on all ranks what one rank would fail at alone: by its padding, or by places in the whole sequence."""
    check_padding_read(crop, options, runner, run, "training_step")
    if tries_global_view:
        check_part_indices(crop, options, runner, run, "training_step")


def _run(
    trial: Trial,
    after: int,
    read: Callable[[], None],
    of_hooks: NumbersOfHooks,
    monitored: Collection[str] | None,
) -> Agreement | None:
    """Compare; in 16 bits and after some steps a difference may be what rounding makes of small gradients: it is said, not refused."""
    try:
        trial = replace(trial, crop=f"{trial.crop} after {after} optimizer steps") if after else trial
        found = run_preflight(trial, monitored, read, of_hooks)
        if found is not None and not math.isnan(found.difference):
            trial.context.adds_up_rows = found.adds_up_rows
        return found
    except TrialFailedError:
        raise
    except SequenceParallelError as error:
        if not after or isinstance(error, LossDiffersError) or not has_16_bit_weights(trial.module):
            raise
        rank_zero_warn(str(error))
        return None


def _try_longer(trial: Trial, own: Crop) -> bool:
    """Compare at another length what may depend on it: a window, a scaling of long contexts, groups of neighbouring tokens.

    Returns:
        Whether the step ran there.
    """
    apart = trial_of_groups(trial, *trial.of_group) if trial.context.mesh.data_parallel_size > 1 else trial
    try:
        found = run_longer(replace(apart, crop=f"a crop of {own.rows} x {own.tokens} tokens"))
    except TrialFailedError as error:
        rank_zero_info(f"preflight: not compared at {own.tokens} tokens: {error}")
        return False
    if found is not None:
        rank_zero_info(found.describe())
    return True


def _trial(
    crop: Crop,
    own: Crop,
    runner: StepRunner,
    run: RunStep,
    options: ShardOptions,
    in_float32: Callable[[], AbstractContextManager[None]] | None,
) -> Trial:
    """Return the step on the crops of all groups, of which this rank's group has its `own`."""
    mesh = runner.context.mesh
    whole, sharded = both_runs(crop, own, options, mesh, runner.device)
    group = untouched_run(own.batch, options, runner.device)
    return Trial(
        module=runner.module,
        context=runner.context,
        run_whole=lambda: run_with_whole_parameters(lambda: run(whole.batch, whole.info)),
        run_sharded=lambda: runner.train(sharded.info, lambda: run(sharded.batch, sharded.info)),
        batch=whole.info,
        of_group=(lambda: run_with_whole_parameters(lambda: run(group.batch, group.info)), group.info),
        shorter=shorter_run(crop, options, run, runner.device),
        shorter_text=shorter_run_of_text(crop, options, run, runner.device),
        own=sharded.info,
        # The rows of the groups' crops stand one after the other in the whole one.
        first_row=mesh.data_parallel_rank % (crop.rows // own.rows) * own.rows,
        sequence_rank=mesh.sequence_rank,
        crop=f"a crop of {crop.rows} x {crop.tokens} tokens",
        device=runner.device,
        control_group=runner.groups.world,
        in_float32=in_float32,
    )


def _why_not(batch: Any, runner: StepRunner, options: ShardOptions) -> str | None:
    """Return why a step cannot be tried, or need not be."""
    whole = runner.context.mesh.layout.size == 1 and not is_sharded(batch)
    if whole and (is_no_structure(batch) or holds_rows_alone(batch_entries(batch, options), options)):
        return "the batch holds no sequence, and none is split"
    return None


def shapes_inferred(batch: Any, options: ShardOptions) -> dict[str, int]:
    """Return the entries that are taken for sequences by their shapes alone; none of a batch that cannot be read, which sharding will say."""
    try:
        return _inferred(batch, replace(options, infer_sequences=True))
    except SequenceParallelError:
        return {}


def _inferred(batch: Any, options: ShardOptions) -> dict[str, int]:
    """Return the entries that are taken for sequences by their shapes alone."""
    if not options.infer_sequences:
        return {}
    entries = batch_entries(batch, options)
    return inferred_dims(entries, _named(entries, options), options.whole_entries)


def _of_other_lengths(batch: Any, options: ShardOptions, inferred: Mapping[str, int]) -> set[str]:
    """Return the entries of other names that are of another length than the batch's sequences, those that an earlier trial has inferred too."""
    entries = batch_entries(batch, options)
    dims = {**named_dims(entries, replace(options, infer_sequences=False)), **inferred}
    if not dims:
        return set()
    lengths = {entries[name].shape[dim] for name, dim in dims.items() if entries[name].dim() > dim} | {1}
    others = {n: t for n, t in entries.items() if n not in STANDARD_NAMES and n not in dims and isinstance(t, Tensor)}
    return {n for n, t in others.items() if t.dim() > 1 and t.shape[1] not in lengths}


def _named(entries: Mapping[str, Any], options: ShardOptions) -> dict[str, int]:
    """Return the dims of known and declared names."""
    # An earlier trial's are inferred once more: what this one returns is all that later batches know.
    return named_dims(entries, replace(options, infer_sequences=False, inferred_dims={}))


def _other_dims(batch: Any, inferred: Mapping[str, int], options: ShardOptions) -> str:
    """Return a line about what else may be the sequence of a batch that was split by its shapes; empty for nothing."""
    entries = batch_entries(batch, options)
    return sequence_in_last_dim(entries, inferred, _named(entries, options))


def _check_inferred(inferred: Mapping[str, int], *, compared: bool) -> None:
    """Name what was split by its shape; refuse it where nothing was compared."""
    if inferred and not compared:
        raise SequenceParallelError(
            f"{', '.join(sorted(inferred))} of the batch look like sequences, but their names are not known, and the preflight has compared "
            f"nothing that would show it; say sequence_dims={inferred}, or rename them"
        )
    if inferred:
        rank_zero_info(
            f"preflight: {', '.join(sorted(inferred))} of the batch are split along dim {_dims(inferred)}, for they have as many rows and "
            "tokens as the sequence; sequence_dims={'name': dim} says otherwise"
        )


def _dims(inferred: Mapping[str, int]) -> str:
    return ", ".join(map(str, sorted({*inferred.values()})))
