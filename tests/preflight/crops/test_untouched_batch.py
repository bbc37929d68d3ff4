"""The reference's batch is the loader's; what sharding adds is there for whoever asks for it by name."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.utilities import move_data_to_device

from lightning_sp.data.batch.shard_options import ShardOptions
from lightning_sp.data.batch.sharding import shard_batch
from lightning_sp.layout import SequenceLayout
from lightning_sp.preflight.crops.untouched_batch import untouched_batch

CPU = torch.device("cpu")


def test_a_model_that_is_handed_the_batch_sees_the_loaders_entries_alone():
    batch = {"input_ids": torch.zeros(2, 5, dtype=torch.long), "labels": torch.arange(10).view(2, 5)}
    held, _ = shard_batch(batch, SequenceLayout(), 0, ShardOptions(model_shifts_labels=True))
    assert set(held) == {"input_ids", "labels", "position_ids", "shift_labels"}
    reference = move_data_to_device(untouched_batch(batch, held, CPU), CPU)
    assert set(dict(**reference)) == set(reference.keys()) == {"input_ids", "labels"}
    assert reference.get("position_ids") is None
    assert "shift_labels" not in reference
    assert reference["position_ids"].tolist() == [[0, 1, 2, 3, 4]] * 2
    assert reference["shift_labels"].tolist() == [[1, 2, 3, 4, -100], [6, 7, 8, 9, -100]]
    with pytest.raises(KeyError, match="other"):
        reference["other"]


def test_tuples_are_as_they_are():
    batch = (torch.zeros(2, 5), torch.ones(2, 5))
    assert untouched_batch(batch, batch, CPU) is batch
