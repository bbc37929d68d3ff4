"""Indices that are positions in the whole sequence: a span's end, a token's head, an antecedent. A rank's part has no such place.

    heads        4 0 7 2 | 1 6 3 5        cross_entropy(scores, heads): 4 classes on a part of 4 tokens, and 7 is none of them

One rank may hold such a number and another not; it would fail alone, while the other waits for it. So the parts are first run by themselves,
forward, with such indices replaced: each part on all ranks, so that they come to its end together whatever it does.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial

import torch
from torch import Tensor

from lightning_sp.data.batch.contents.entries import STANDARD_NAMES, batch_entries, sequence_dims
from lightning_sp.data.batch.shard_options import ShardOptions
from lightning_sp.errors import SequenceParallelError
from lightning_sp.preflight.crops.both_runs import part_run, run_forward
from lightning_sp.preflight.crops.crop import Crop
from lightning_sp.preflight.crops.shorter import RunStep
from lightning_sp.preflight.recording.checked_indices import CheckedIndices
from lightning_sp.preflight.trial import alone
from lightning_sp.step.runner import StepRunner

# Of the names that are known, those of targets: the others are ids, masks, and places of tokens that go with them.
_TARGETS = ("labels", "targets")


class PartIndexError(SequenceParallelError):
    """A step that runs on a sequence whole reads a rank's part by an index into the whole."""


def check_part_indices(crop: Crop, options: ShardOptions, runner: StepRunner, run: RunStep, name: str) -> None:
    """Run a step forward on each rank's part of a crop, and refuse it where an index is beyond that. Every rank must call it.

    What a part cannot run by itself is not refused: the run on parts comes next, in which ranks exchange what they need. Nothing is run where
    the step sees whole sequences, and where no entry may hold such indices: whole numbers that are all places of the whole sequence, and some
    of them beyond a part.

    Args:
        crop: of all groups, the same on every rank.
        options: of sharding.
        runner: of the model's steps.
        run: the user's step on a batch, which runs on the crop as it is.
        name: of the step.

    Raises:
        PartIndexError: an index is out of range; on all ranks together.
    """
    size = runner.context.mesh.layout.size
    if runner.context.global_view or size == 1:
        return
    named = _places(crop, options, size)
    found = [why for rank in range(size) for why in _run(crop, rank, options, runner, run)] if named else []
    if found:
        raise PartIndexError(
            f"{name} runs on a crop of {crop.rows} x {crop.tokens} tokens whole, and reads a rank's part by an index beyond it "
            f"({', '.join(dict.fromkeys(found[:2]))}); {', '.join(named)} of the batch may hold places in the whole sequence, of which each of "
            f"{size} ranks has a part; global_view=True shows the step whole sequences, or make what is indexed whole with "
            "lightning_sp.reductions.unshard(x)"
        )


def _places(crop: Crop, options: ShardOptions, size: int) -> list[str]:
    """Return the entries that may hold places of the whole sequence."""
    entries = batch_entries(crop.batch, options)
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


def _run(crop: Crop, rank: int, options: ShardOptions, runner: StepRunner, run: RunStep) -> list[str]:
    """Return which indices are beyond a rank's part."""
    part = part_run(crop, options, runner.context.mesh, rank, runner.device)
    indices = CheckedIndices(goes_on=True)
    with (
        # A model that compares the places for images in its text with all images takes no part by itself.
        suppress(Exception),
        alone(runner.module, runner.context, part.info, device=runner.device, uneven=crop.uneven_entries),
        indices,
    ):
        run_forward(runner.module, partial(run, part.batch, part.info))
    found: list[str] = indices.found
    return found
