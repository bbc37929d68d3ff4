"""Which batches run whole on every rank: those of pictures and sounds alone, and what the user says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lightning_sp.data.batch.contents.without_sequence import describe_whole, holds_no_sequence
from lightning_sp.data.batch.shard_options import ShardOptions
from lightning_sp.data.batch.sharding import shard_batch
from lightning_sp.layout import SequenceLayout

PICTURES, CLASSES = torch.zeros(2, 3, 8, 8), torch.tensor([0, 1])
IDS = torch.arange(12).view(2, 6)
WHOLE: list[Any] = [
    (PICTURES, CLASSES),
    PICTURES,
    {"pixel_values": PICTURES, "labels": CLASSES},
    {"pixel_values": PICTURES, "labels": torch.zeros(2, 5)},
    {"pixel_values": PICTURES, "labels": torch.zeros(2, 8, 8, dtype=torch.int64), "path": ["a", "b"]},
    {"pixel_values": PICTURES, "bool_masked_pos": torch.zeros(2, 4, dtype=torch.bool), "weights": torch.zeros(2, 1)},
    {"pixel_values_videos": torch.zeros(2, 4, 3, 8, 8), "targets": CLASSES, "index": 3, "none": None},
    {"pixel_values": PICTURES, "labels": [{"boxes": torch.zeros(3, 4)}, {"boxes": torch.zeros(2, 4)}]},
    {"pixel_values": PICTURES, "class_labels": [CLASSES, CLASSES], "mask_labels": [torch.zeros(2, 8, 8)] * 2},
    {"input_values": torch.zeros(2, 1024, 128), "labels": CLASSES},
    {"input_features": torch.zeros(2, 80, 300), "labels": CLASSES},
]
NOT_WHOLE: list[Any] = [
    {"pixel_values": PICTURES, "input_ids": IDS},
    {"pixel_values": PICTURES, "labels": IDS},
    {"pixel_values": PICTURES, "caption": IDS},
    {"pixel_values": PICTURES, "states": torch.zeros(2, 6, 4)},
    {"pixel_values": PICTURES, "codes": torch.zeros(2, 6, 4, dtype=torch.int64)},
    {"pixel_values": PICTURES, "caption": [[1, 2], [3]]},
    {"pixel_values": PICTURES, "caption": np.zeros((2, 6))},
    {"pixel_values": PICTURES, "texts": [{"input_ids": CLASSES}, {"input_ids": CLASSES}]},
    {"pixel_values": PICTURES, "input_ids": [CLASSES, CLASSES]},
    {"labels": [{"boxes": torch.zeros(3, 4)}, {"boxes": torch.zeros(2, 4)}]},
    {"input_values": torch.zeros(2, 640), "attention_mask": torch.ones(2, 640)},
    {"input_features": torch.zeros(2, 80, 300), "labels": IDS},
    (torch.zeros(2, 6, 4), CLASSES),
    (torch.zeros(2, 6), CLASSES),
    (IDS, IDS),
    {"text": ["a", "b"], "labels": CLASSES},
    {"images": {"left": PICTURES}, "labels": CLASSES},
    torch.zeros(2, 6, 4),
]


@pytest.mark.parametrize("batch", WHOLE, ids=lambda batch: str(type(batch).__name__))
def test_pictures_and_sounds_without_tokens_run_whole_at_every_degree(batch: Any):
    for layout in (SequenceLayout(), SequenceLayout(2, 2)):
        local, info = shard_batch(batch, layout, layout.size - 1, ShardOptions())
        assert local is batch
        assert (info.rows, info.length, info.padded_length, info.is_whole) == (2, 1, 1, True)


@pytest.mark.parametrize("batch", NOT_WHOLE, ids=lambda batch: str(type(batch).__name__))
def test_what_may_be_tokens_does_not(batch: Any):
    assert not holds_no_sequence(batch, ShardOptions())
    assert not holds_no_sequence(batch, ShardOptions(infer_sequences=True))


def test_the_user_says_that_there_is_none_or_which_it_is():
    none = ShardOptions(none_declared=True)
    assert holds_no_sequence((torch.zeros(2, 6, 4), torch.zeros(2, 6)), none)
    assert holds_no_sequence({"pixel_values": PICTURES, "labels": IDS}, none)
    assert not holds_no_sequence({"pixel_values": PICTURES, "input_ids": IDS}, none)
    assert not holds_no_sequence((PICTURES, CLASSES), ShardOptions(sequence_dims={"0": 1}))


def test_the_warning_has_the_shapes_and_the_ranks():
    told = describe_whole({"pixel_values": PICTURES, "labels": CLASSES}, 4)
    assert "pixel_values: (2, 3, 8, 8), labels: (2,)" in told
    assert "each of the 4 ranks" in told
