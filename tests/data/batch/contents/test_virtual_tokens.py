"""Room before the sequence: labels are shifted over it, padding masks see it, positions begin with it."""

from __future__ import annotations

import pytest
import torch

from lightning_sp import SequenceParallelError
from lightning_sp.data.batch.shard_options import ShardOptions
from lightning_sp.data.batch.sharding import shard_batch
from lightning_sp.labels import IGNORE_INDEX
from lightning_sp.layout import SequenceLayout, merge

LAYOUT = SequenceLayout(2, 1)
OPTIONS = ShardOptions(virtual_tokens=3, model_shifts_labels=True)


def whole(batch, options=OPTIONS):
    """Return each entry of all ranks, merged, and one rank's note of the sequence."""
    found = [shard_batch(batch, LAYOUT, rank, options) for rank in range(LAYOUT.size)]
    names = found[0][0]
    return {name: merge(torch.stack([local[name] for local, _ in found]), LAYOUT, dim=1) for name in names}, found[0][1]


def test_labels_are_shifted_over_the_room():
    ids = torch.arange(1, 11).view(2, 5)
    batch, info = whole({"input_ids": ids, "labels": ids, "attention_mask": torch.ones(2, 5)})
    assert (info.length, info.padded_length) == (8, 8)
    assert batch["input_ids"][0].tolist() == [0, 0, 0, 1, 2, 3, 4, 5]
    assert batch["shift_labels"][1].tolist() == [IGNORE_INDEX, IGNORE_INDEX, 6, 7, 8, 9, 10, IGNORE_INDEX]
    assert batch["attention_mask"].all()
    assert batch["position_ids"][1].tolist() == list(range(8))


def test_positions_of_the_batch_are_left_out_as_peft_does():
    batch, info = whole(
        {"input_ids": torch.ones(1, 5, dtype=torch.long), "position_ids": torch.tensor([[0, 1, 0, 1, 2]])}
    )
    assert batch["position_ids"].tolist() == [list(range(8))]
    assert info.boundaries is None


@pytest.mark.parametrize(
    ("options", "batch", "said"),
    [
        ({"packed_documents": True}, {}, "packed_documents=True, and the model puts 3 virtual tokens before each sequence"),
        ({"sequence_dims": {"speed": 1}}, {"speed": torch.ones(1, 5)}, "what ['speed'] of the batch hold for these is not known"),
    ],
)  # fmt: skip
def test_what_cannot_have_room_is_refused(options, batch, said):
    options = ShardOptions(virtual_tokens=3, **options)
    with pytest.raises(SequenceParallelError) as refused:
        shard_batch({"input_ids": torch.ones(1, 5, dtype=torch.long), **batch}, LAYOUT, 0, options)
    assert said in str(refused.value)
