"""Which entries of a batch carry the sequence: by their names and shapes; and a batch that holds none."""

from __future__ import annotations

import pytest
import torch

from lightning_sp.data.batch.entries import sequence_dims
from lightning_sp.data.batch.shard_options import ShardOptions
from lightning_sp.data.batch.sharding import shard_batch
from lightning_sp.errors import SequenceParallelError
from lightning_sp.layout import SequenceLayout

IDS = torch.arange(12).view(2, 6)
IMAGES = {"pixel_values": torch.zeros(2, 3, 4, 4), "labels": torch.tensor([0, 1])}


@pytest.mark.parametrize("name", ["loss_weights", "target_mask", "seq_idx", "mm_token_type_ids", "loss_mask"])
def test_weights_and_marks_of_tokens_are_known_by_name(name):
    assert sequence_dims({"input_ids": IDS, name: torch.ones(2, 6)}, ShardOptions()) == {"input_ids": 1, name: 1}


@pytest.mark.parametrize(
    "row", [("labels", (2,)), ("loss_weights", (2,)), ("loss_weights", (2, 1)), ("target_mask", (2, 1))]
)
def test_what_says_of_rows_passes_whole(row):
    name, shape = row
    assert sequence_dims({"input_ids": IDS, name: torch.ones(shape)}, ShardOptions()) == {"input_ids": 1}


def test_a_batch_without_a_sequence_passes_whole_where_none_is_split():
    local, info = shard_batch(IMAGES, SequenceLayout(), 0, ShardOptions())
    assert local is IMAGES
    assert (info.rows, info.length, info.position_ids) == (2, 1, None)
    with pytest.raises(SequenceParallelError, match=r"no sequence dimension.*or train without splitting sequences"):
        shard_batch(IMAGES, SequenceLayout(2, 1), 0, ShardOptions())
