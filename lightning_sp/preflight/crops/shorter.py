"""A step on a shorter crop: how many tokens each attention reads there tells whether these are the sequence's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from lightning_sp.context.sequence import SequenceInfo
from lightning_sp.data.batch.contents.entries import batch_entries, inputs_of_whole_encoder, plain_entries
from lightning_sp.data.batch.contents.media import is_of_media
from lightning_sp.data.batch.shard_options import ShardOptions
from lightning_sp.layout import SequenceLayout
from lightning_sp.parallelize import run_with_whole_parameters
from lightning_sp.preflight.crops.both_runs import untouched_run
from lightning_sp.preflight.crops.crop import Crop, crop_batch, crop_extent, other_lengths, rebuild_plain

# Runs the user's step on a batch of the host, as the precision and the device want it; given what was whole.
RunStep = Callable[[Any, SequenceInfo], Any]
# A run of the step on a crop, and what that holds.
ShorterRun = tuple[Callable[[], Any], SequenceInfo]


def shorter_run(crop: Crop, options: ShardOptions, run: RunStep, device: torch.device) -> ShorterRun | None:
    """Return what runs the step on three quarters of a whole crop's tokens, and what that holds; None where they are too few."""
    _, *lengths = crop_extent(crop.batch, options, SequenceLayout(), crop.tokens)
    others = other_lengths(crop.batch, options)
    shorter = tuple(length - length // 4 for length in lengths)
    while not others.isdisjoint(shorter):
        shorter = tuple(length - 1 for length in shorter)
    if shorter == tuple(lengths) or min(shorter) < 1:
        return None
    part = untouched_run(crop_batch(crop.batch, options, (crop.rows, *shorter)).batch, options, device)
    return lambda: run_with_whole_parameters(lambda: run(part.batch, part.info)), part.info


def shorter_run_of_text(crop: Crop, options: ShardOptions, run: RunStep, device: torch.device) -> ShorterRun | None:
    """Return the same without images, videos and sounds: their placeholders may fill the crop, and none of them can be left out alone.

    An encoder that reads nothing else cannot do without them.
    """
    entries = plain_entries(crop.batch)
    if inputs_of_whole_encoder(batch_entries(crop.batch, options), options):
        return None
    text = {name: value for name, value in entries.items() if not is_of_media(name, value)}
    if len(text) == len(entries) or not isinstance(crop.batch, Mapping):
        return None
    return shorter_run(replace(crop, batch=rebuild_plain(crop.batch, text)), options, run, device)
