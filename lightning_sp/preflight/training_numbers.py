"""The numbers that training_step logs on a crop, and with other outcomes for some of its tokens: those of one device, or named."""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set
from dataclasses import replace

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_sp import comm
from lightning_sp.errors import SequenceParallelError
from lightning_sp.preflight.differences.groups import trial_of_groups
from lightning_sp.preflight.differences.other_outcomes import (
    UNSEEN,
    common_calls,
    in_words,
    turned_alone,
    uniform_calls,
)
from lightning_sp.preflight.failing_steps import say_not_compared
from lightning_sp.preflight.numbers import (
    RankNumbers,
    coarse_numbers,
    counted_once,
    described,
    differences,
    rounded_numbers,
)
from lightning_sp.preflight.outcome import Outcome
from lightning_sp.preflight.recording.logged import OF_LOGGER
from lightning_sp.preflight.rounded_numbers import with_moves
from lightning_sp.preflight.trial import SEED, Trial


class NumbersDifferError(SequenceParallelError):
    """A training step logs other numbers than on one device, or leaves such in attributes; its weights are one device's."""

    of_numbers = True


def compare_training_numbers(
    trial: Trial, whole: Outcome, sharded: Outcome, monitored: Collection[str], *, undecided: bool = False
) -> None:
    """Compare what a sharded step logs with the same of whole sequences, each data-parallel group's own. Every rank must call it.

    The whole step runs twice more, from two seeds, unless it logs its loss alone, which is compared already; and both runs once more where all
    tokens have one outcome: all are targets, none is predicted right.

    Args:
        trial: of the step.
        whole: what it gave whole.
        sharded: what it gave on shards, and logged.
        monitored: names of numbers that decide about the run.
        undecided: those alone are compared of which trials before have not told whether they agree by chance.

    Raises:
        NumbersDifferError: a number is not that of one device, with `may_retry`. Else a warning says so.
        SequenceParallelError: a monitored number is not.
    """
    trial.context.logged_names = (trial.context.logged_names or frozenset()) | sharded.numbers.keys()
    loss = None if sharded.loss is None else float(sharded.loss.detach())
    others = any(number.value != loss or number.reduced == "sum" for number in sharded.numbers.values())
    if not any(comm.gather_objects(others, trial.control_group)):
        return
    groups = trial.context.mesh.data_parallel_size > 1
    apart = replace(trial_of_groups(trial, *trial.of_group), first_row=0) if groups else trial
    of_one, again = (apart.numbers_of_whole(seed) for seed in (SEED, SEED + 1))
    in_16_bits = any(torch.finfo(dtype).bits == 16 for dtype in whole.dtypes)
    own = RankNumbers(trial.sequence_rank, of_one, again, sharded.numbers, in_16_bits)
    of_ranks = _of_ranks(apart, own)
    # A step logs other names in other batches.
    trial.context.logged_once.setdefault("training_step", {}).update(counted_once(of_ranks))
    differ, known = differences(of_ranks), trial.context.undecided_numbers
    _note_numbers_by_chance(trial, of_ranks, {each.name for each in differ})
    differ = [each for each in differ if not undecided or each.name in known]
    if differ:
        text = described(differ, f"training_step on {trial.crop}", () if trial.may_retry else monitored)
        if trial.may_retry:
            raise NumbersDifferError(text)
        rank_zero_warn(text)
    elif not undecided and trial.context.mesh.splits_samples and not trial.context.global_view:
        calls = uniform_calls(common_calls(whole.token_outcomes, sharded.token_outcomes, trial.control_group))
        if calls:
            # At one token of each row, in the first part: what parts count is no longer alike, so that a mean of their means differs.
            _compare_with_other_outcomes(replace(apart, turned=turned_alone(calls), turned_once=True), own)


def _of_ranks(apart: Trial, own: RankNumbers) -> list[RankNumbers]:
    own = with_moves(own, apart.module, lambda: apart.numbers_of_whole(SEED), apart.control_group)
    return comm.gather_objects(own, apart.control_group)


def _compare_with_other_outcomes(apart: Trial, first: RankNumbers) -> None:
    """Compare once more, with other outcomes for tokens that have one now.

    Args:
        apart: a trial that shows them.
        first: the numbers of this rank without.

    Raises:
        NumbersDifferError: a number is not that of one device, with `may_retry`. Else a warning says so: nobody has seen it yet.
    """
    words = in_words(apart.turned)
    try:
        whole, part = apart.numbers_of_whole(SEED), apart.sharded().numbers
    except Exception as error:  # on all ranks
        if comm.is_of_communication(error):
            raise
        say_not_compared(f"what training_step logs is not compared {words}", error)
        return
    repeated = {name: each for name, each in whole.items() if first.again.get(name) == first.whole.get(name)}
    of_ranks = _of_ranks(apart, replace(first, whole=whole, again=repeated, sharded=part))
    if differ := differences(of_ranks):
        text = f"{described(differ, f'training_step on {apart.crop}, {words},', ())}. {UNSEEN}"
        if apart.may_retry:
            raise NumbersDifferError(text)
        rank_zero_warn(text)


def _note_numbers_by_chance(trial: Trial, of_ranks: Sequence[RankNumbers], told: Set[str]) -> None:
    """Note which numbers agree, and may do so by chance: those that the ranks then compare in each step, and others.

    Args:
        trial: of the step.
        of_ranks: its numbers, of every rank of the world.
        told: names of those that differ.
    """
    context = trial.context
    shown = [(name, number) for each in of_ranks for name, number in each.sharded.items()]
    judged, synced = {name for name, _ in shown}, {name for name, number in shown if number.reduced}
    rounded = rounded_numbers(of_ranks).keys()
    coarse = coarse_numbers(of_ranks, trial.batch.rows * trial.batch.length).keys()
    watched = {name for name in coarse if not name.endswith(OF_LOGGER)} - synced - rounded - told
    context.watched_numbers = (context.watched_numbers - judged) | watched
    undecided = frozenset() if context.global_view else (coarse & synced | rounded) - told
    context.undecided_numbers = (context.undecided_numbers - judged) | undecided
