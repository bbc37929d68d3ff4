"""Indices that are positions in the whole sequence: a span's end, a token's head, an antecedent. A rank's part has no such place.

    heads        4 0 7 2 | 1 6 3 5        cross_entropy(scores, heads): 4 classes on a part of 4 tokens, and 7 is none of them

One rank may hold such a number and another not; it would fail alone, while the other waits for it. So each rank first runs its part by itself,
forward, with such indices replaced, and all ranks come to the end together.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from lightning_sp import comm
from lightning_sp.data.batch.contents.entries import STANDARD_NAMES, batch_entries, sequence_dims
from lightning_sp.data.batch.shard_options import ShardOptions
from lightning_sp.errors import SequenceParallelError
from lightning_sp.preflight.crops.both_runs import both_runs
from lightning_sp.preflight.crops.crop import Crop
from lightning_sp.preflight.crops.shorter import RunStep
from lightning_sp.preflight.recording.checked_indices import CheckedIndices
from lightning_sp.preflight.trial import alone, run_forward, together
from lightning_sp.step.runner import StepRunner

# Of the names that are known, those of targets: the others are ids, masks, and places of tokens that go with them.
_TARGETS = ("labels", "targets")


class PartIndexError(SequenceParallelError):
    """A step that runs on a sequence whole reads a rank's part by an index into the whole."""


def check_part_indices(
    crop: Crop, own: Crop, options: ShardOptions, runner: StepRunner, run: RunStep, name: str
) -> None:
    """Run a step forward on this rank's part alone, and refuse it where an index is beyond that. Every rank must call it.

    Nothing is run where the step sees whole sequences, and where no entry of a group's crop may hold such indices: whole numbers that are all
    places of the whole sequence, and some of them beyond a part.

    Args:
        crop: whole, of all groups.
        own: of this rank's group.
        options: of sharding.
        runner: of the model's steps.
        run: the user's step on a batch, which runs on the crop as it is.
        name: of the step.

    Raises:
        PartIndexError: an index is out of range; on all ranks together.
    """
    mesh = runner.context.mesh
    if runner.context.global_view or mesh.layout.size == 1:
        return
    named = _places(own, options, mesh.layout.size)
    if not int(comm.largest(torch.tensor(len(named)), runner.groups.world)):
        return
    with together():
        found = _run(crop, own, options, runner, run)
    of_ranks = comm.gather_objects(", ".join(dict.fromkeys(found[:2])), runner.groups.world)
    if why := next(filter(None, of_ranks), ""):
        raise PartIndexError(
            f"{name} runs on a crop of {own.rows} x {own.tokens} tokens whole, and reads a rank's part by an index beyond it ({why}); "
            f"{', '.join(named) or 'an entry'} of the batch may hold places in the whole sequence, of which each of {mesh.layout.size} ranks "
            "has a part; global_view=True shows the step whole sequences, or make what is indexed whole with "
            "lightning_sp.reductions.unshard(x)"
        )


def _places(own: Crop, options: ShardOptions, size: int) -> list[str]:
    """Return the entries that may hold places of the whole sequence."""
    entries = batch_entries(own.batch, options)
    found = []
    for name, dim in sequence_dims(entries, options).items():
        value: Tensor = entries[name]
        known = name in STANDARD_NAMES and name not in _TARGETS
        if known or value.is_floating_point() or value.dtype == torch.bool or not value.numel():
            continue
        most = int(value.max())
        if value.shape[dim] // size <= most < value.shape[dim]:
            found.append(name)
    return found


def _run(crop: Crop, own: Crop, options: ShardOptions, runner: StepRunner, run: RunStep) -> list[str]:
    """Return which indices are beyond this rank's part. What else fails would fail in the run on parts."""
    _, part = both_runs(crop, own, options, runner.context.mesh, runner.device)
    with (
        alone(runner.module, runner.context, part.info, device=runner.device, uneven=own.uneven_entries),
        CheckedIndices(goes_on=True) as indices,
    ):
        run_forward(runner.module, partial(run, part.batch, part.info))
    found: list[str] = indices.found
    return found
