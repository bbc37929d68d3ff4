"""What a step makes of padding, tried whole: where it reads a label of padding as an index, the rank that holds it would fail alone.

    labels       3 1 4 1 5 | -100        logp.gather(-1, labels)        torch's cross entropies leave -100 out; an index it is none

So the step runs forward on a whole crop whose last labels are -100, on all ranks alike: what it raises, it raises on all of them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_sp import comm
from lightning_sp.data.batch.contents.entries import STANDARD_NAMES, batch_entries, plain_entries, sequence_dims
from lightning_sp.data.batch.shard_options import ShardOptions
from lightning_sp.errors import SequenceParallelError, told_error
from lightning_sp.labels import IGNORE_INDEX, can_be_ignored
from lightning_sp.layout import SequenceLayout
from lightning_sp.preflight.crops.both_runs import run_forward, untouched_run
from lightning_sp.preflight.crops.crop import Crop, rebuild_plain
from lightning_sp.preflight.crops.shorter import RunStep
from lightning_sp.preflight.recording.checked_indices import CheckedIndices
from lightning_sp.preflight.trial import alone, together
from lightning_sp.step.runner import StepRunner


class PaddingReadError(SequenceParallelError):
    """A step that runs on a sequence whole fails on its padding."""


def check_padding_read(crop: Crop, options: ShardOptions, runner: StepRunner, run: RunStep, name: str) -> None:
    """Run a step forward on a crop whose last labels are what fills padding. Every rank must call it.

    Nothing is run where no rank's crop is padded, where the step sees whole sequences, and where labels of the crop are ignored anyway.

    Args:
        crop: whole, of all groups or of this rank's own.
        options: of sharding.
        runner: of the model's steps.
        run: the user's step on a batch, which runs on the crop as it is.
        name: of the step.

    Raises:
        PaddingReadError: it fails; on all ranks together.
    """
    layout = runner.context.mesh.layout
    if runner.context.global_view or layout.size == 1:
        return
    filled, number = _with_ignored_labels(crop, options, layout)
    if not int(comm.largest(torch.tensor(number), runner.groups.world)):
        return
    try:
        with together():
            _run_named(
                crop.batch if filled is None else filled,
                crop,
                options,
                runner,
                run,
                _described(name, crop, number, layout),
            )
    except SequenceParallelError as error:  # of another rank, too
        raise PaddingReadError(str(error)) from error


def _with_ignored_labels(crop: Crop, options: ShardOptions, layout: SequenceLayout) -> tuple[Any, int]:
    """Return a crop's batch whose last labels are ignored, as many as it is padded by, and that number; None and 0 where there are none."""
    entries = plain_entries(crop.batch)
    found: dict[str, Tensor] = {}
    number = 0
    for name, dim in sequence_dims(batch_entries(crop.batch, options), options).items():
        if name not in entries:
            continue
        value: Tensor = entries[name]
        length = value.shape[dim]
        pads = min(layout.padded_length(length) - length, length)
        fills = STANDARD_NAMES.get(name, (dim, 0))[1] == IGNORE_INDEX
        if pads and fills and not value.is_floating_point() and not bool((value == IGNORE_INDEX).any()):
            found[name] = can_be_ignored(value).clone()
            found[name].narrow(dim, length - pads, pads).fill_(IGNORE_INDEX)
            number = max(number, pads)
    return (rebuild_plain(crop.batch, {**entries, **found}), number) if found else (None, 0)


def _run_named(batch: Any, crop: Crop, options: ShardOptions, runner: StepRunner, run: RunStep, why: str) -> None:
    try:
        _run(batch, crop, options, runner, run)
    except Exception as error:
        if isinstance(error, comm.PeerError) or comm.is_of_communication(error) or batch is crop.batch:
            raise
        raise SequenceParallelError(why.format(told_error(error).replace("{", "(").replace("}", ")"))) from error


def _run(batch: Any, crop: Crop, options: ShardOptions, runner: StepRunner, run: RunStep) -> None:
    part = untouched_run(batch, options, runner.device)
    uneven = crop.uneven_entries
    with (
        alone(runner.module, runner.context, part.info, device=runner.device, uneven=uneven),
        CheckedIndices(),
    ):
        # With a graph where the step has one: it may ask for gradients by itself.
        run_forward(runner.module, partial(run, part.batch, part.info))


def _described(name: str, crop: Crop, added: int, layout: SequenceLayout) -> str:
    """Return the refusal, with room for what was raised."""
    return (
        f"{name} runs on a crop of {crop.rows} x {crop.tokens} tokens, and fails where its last {added} labels are -100, as those of the "
        f"padding are that {layout.size} ranks need ({{}}); torch's cross entropies leave -100 out, and it is no "
        "index; write keep = labels != -100 and logp.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)[keep], give rows "
        f"a multiple of {layout.multiple} tokens in the collate function, or use global_view=True, whose padding repeats the last token"
    )
