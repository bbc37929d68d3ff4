"""Where ranks share no sequence a batch needs none: numbers of rows pass as they are."""

from __future__ import annotations

import pytest
import torch

from lightning_sp import SequenceParallelError
from lightning_sp.data.batch.shard_options import ShardOptions
from lightning_sp.data.batch.sharding import shard_batch
from lightning_sp.layout import SequenceLayout


@pytest.mark.parametrize("batch", [torch.arange(3), {"input_ids": torch.arange(3)}], ids=["tensor", "dict"])
def test_rows_without_a_sequence_pass_where_no_sequence_is_split(batch: object):
    local, info = shard_batch(batch, SequenceLayout(), 0, ShardOptions())
    assert local is batch
    assert (info.rows, info.is_whole) == (3, False)
    with pytest.raises(SequenceParallelError, match=r"the batch has no sequence dimension in \['input_ids'\]"):
        shard_batch(batch, SequenceLayout(ring_size=2), 0, ShardOptions())


@pytest.mark.parametrize("batch", [5, "a text", object()])
def test_what_is_no_structure_of_tensors_passes_where_no_sequence_is_split(batch: object):
    local, info = shard_batch(batch, SequenceLayout(), 0, ShardOptions())
    assert local is batch
    assert (info.rows, info.length, info.is_whole) == (1, 1, False)
    with pytest.raises(SequenceParallelError, match=f"a batch of type {type(batch).__name__} cannot be sharded"):
        shard_batch(batch, SequenceLayout(ring_size=2), 0, ShardOptions())
