"""The numbers that training_step logs on a crop: those of one device, or named."""

from __future__ import annotations

from collections.abc import Collection

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_sp import comm
from lightning_sp.errors import SequenceParallelError
from lightning_sp.preflight.differences.groups import trial_of_groups
from lightning_sp.preflight.numbers import RankNumbers, coarse_numbers, counted_once, described, differences
from lightning_sp.preflight.outcome import Outcome
from lightning_sp.preflight.recording.attributes import ATTRIBUTE
from lightning_sp.preflight.recording.logged import OF_LOGGER
from lightning_sp.preflight.rounded_numbers import with_moves
from lightning_sp.preflight.trial import SEED, Trial


class AttributesDifferError(SequenceParallelError):
    """A training step leaves other numbers in attributes than on one device: a later step may make a learning rate of them, say."""


def compare_training_numbers(trial: Trial, whole: Outcome, sharded: Outcome, monitored: Collection[str]) -> None:
    """Compare what a sharded step logs with the same of whole sequences, each data-parallel group's own. Every rank must call it.

    The whole step runs twice more, from two seeds, unless it logs its loss alone, which is compared already.

    Args:
        trial: of the step.
        whole: what it gave whole.
        sharded: what it gave on shards, and logged.
        monitored: names of numbers that decide about the run.

    Raises:
        SequenceParallelError: a monitored number is not that of one device.
        AttributesDifferError: an attribute is not, with `may_retry`.
    """
    trial.context.logged_names = (trial.context.logged_names or frozenset()) | sharded.numbers.keys()
    loss = None if sharded.loss is None else float(sharded.loss.detach())
    others = any(number.value != loss or number.reduced == "sum" for number in sharded.numbers.values())
    if not any(comm.gather_objects(others, trial.control_group)):
        return
    apart = trial_of_groups(trial, *trial.of_group) if trial.context.mesh.data_parallel_size > 1 else trial
    of_one, again = (apart.numbers_of_whole(seed) for seed in (SEED, SEED + 1))
    in_16_bits = any(torch.finfo(dtype).bits == 16 for dtype in whole.dtypes)
    own = RankNumbers(trial.sequence_rank, of_one, again, sharded.numbers, in_16_bits)
    own = with_moves(own, trial.module, lambda: apart.numbers_of_whole(SEED), trial.control_group)
    of_ranks = comm.gather_objects(own, trial.control_group)
    # A step logs other names in other batches.
    trial.context.logged_once.setdefault("training_step", {}).update(counted_once(of_ranks))
    differ = differences(of_ranks)
    coarse = coarse_numbers(of_ranks, trial.batch.rows * trial.batch.length)
    by_chance = [name for name in coarse if not name.endswith(OF_LOGGER)]
    told, synced = (
        {each.name for each in differ},
        {n for each in of_ranks for n, number in each.sharded.items() if number.reduced},
    )
    judged = {name for each in of_ranks for name in each.sharded}
    trial.context.watched_numbers = (trial.context.watched_numbers - judged) | (frozenset(by_chance) - told - synced)
    if differ:
        text = described(differ, f"training_step on {trial.crop}", monitored)
        if trial.may_retry and any(each.name.endswith(ATTRIBUTE) for each in differ):
            raise AttributesDifferError(text)
        rank_zero_warn(text)
