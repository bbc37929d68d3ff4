"""The numbers that training_step logs on a crop: those of one device, or named."""

from __future__ import annotations

from collections.abc import Collection

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_sp import comm
from lightning_sp.preflight.groups import trial_of_groups
from lightning_sp.preflight.numbers import RankNumbers, counted_once, described, differences
from lightning_sp.preflight.trial import SEED, Outcome, Trial


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
    """
    loss = None if sharded.loss is None else float(sharded.loss.detach())
    others = any(number.value != loss or number.reduced == "sum" for number in sharded.numbers.values())
    if not any(comm.gather_objects(others, trial.control_group)):
        return
    apart = trial_of_groups(trial, *trial.of_group) if trial.context.mesh.data_parallel_size > 1 else trial
    of_one, again = (apart.numbers_of_whole(seed) for seed in (SEED, SEED + 1))
    in_16_bits = any(torch.finfo(dtype).bits == 16 for dtype in whole.dtypes)
    own = RankNumbers(trial.sequence_rank, of_one, again, sharded.numbers, in_16_bits)
    of_ranks = comm.gather_objects(own, trial.control_group)
    trial.context.logged_once["training_step"] = counted_once(of_ranks)
    if differ := differences(of_ranks):
        rank_zero_warn(described(differ, f"training_step on {trial.crop}", monitored))
