"""Which crops follow one on which a step has failed."""

from __future__ import annotations

from functools import partial

import torch

from lightning_sp.config import StrategyConfig
from lightning_sp.data.batch.shard_options import ShardOptions
from lightning_sp.layout import SequenceLayout
from lightning_sp.preflight.crops.crop import crop_batch, crop_extent
from lightning_sp.preflight.lengths.larger_crops import of_whole_sequences

OF_SOUNDS = ShardOptions({"input_values": 1}, labels_shifted=True, decoder_inputs=lambda labels: labels)
OF_TEXT = ShardOptions(labels_shifted=True)


def cut(batch, options, *, wanted):
    crop = crop_batch(batch, options, crop_extent(batch, options, SequenceLayout(2, 1), wanted))
    return crop, crop


def next_crop(batch, options):
    crop, _ = cut(batch, options, wanted=None)
    return crop, of_whole_sequences(batch, partial(cut, batch, options), options, StrategyConfig(), crop)


def test_a_sound_is_whole_though_its_transcript_was_whole_before():
    """A convolution finds too few samples in a crop of them, beside a transcript that is no longer than a crop."""
    sound = {"input_values": torch.randn(2, 600), "attention_mask": torch.ones(2, 600, dtype=torch.long)}
    crop, larger = next_crop({**sound, "labels": torch.randint(9, (2, 22))}, OF_SOUNDS)
    assert (crop.tokens, crop.batch["input_values"].shape[1]) == (22, 64)
    assert larger is not None
    assert (larger[0].tokens, larger[0].batch["input_values"].shape[1]) == (22, 600)


def test_no_crop_follows_one_that_is_whole():
    ids = torch.randint(9, (2, 22))
    assert next_crop({"input_ids": ids, "labels": ids}, OF_TEXT)[1] is None
