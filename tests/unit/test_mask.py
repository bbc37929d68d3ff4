"""The mask as a value: what it refuses, and how documents become boundaries."""

from __future__ import annotations

import re

import pytest
import torch

from lightning_sp.attention import AttentionMask, boundaries_from_lengths, boundaries_from_positions
from lightning_sp.attention.mask import document_ids
from lightning_sp.data.batch import ShardOptions, shard_batch
from lightning_sp.errors import SequenceParallelError
from lightning_sp.layout import SequenceLayout


@pytest.mark.parametrize(
    ("boundaries", "message"),
    [
        (torch.tensor([0, 4]), "boundaries of shape (2,), torch.int64 on cpu: must be int64 on the CPU"),
        (torch.tensor([[0, 4]], dtype=torch.int32), "boundaries of shape (1, 2), torch.int32 on cpu"),
        (torch.tensor([[0]]), "boundaries of shape (1, 1), torch.int64"),
        (torch.tensor([[0, 4]], device="meta"), "boundaries of shape (1, 2), torch.int64 on meta"),
        (torch.tensor([[1, 4]]), "boundaries [[1, 4]]: each row must rise from 0"),
        (torch.tensor([[0, 5, 4, 8]]), "boundaries [[0, 5, 4, 8]]: each row must rise"),
        (torch.tensor([[0, 4, 8], [0, 4, 7]]), "boundaries [[0, 4, 8], [0, 4, 7]]: each row must rise from 0 to the sequence length"),
    ],
)  # fmt: skip
def test_boundaries_of_a_wrong_form_are_refused(boundaries, message):
    with pytest.raises(SequenceParallelError, match=re.escape(message)):
        AttentionMask(boundaries=boundaries)


def test_boundaries_that_do_not_fit_the_sequence_or_the_batch_are_refused():
    mask = AttentionMask(boundaries=boundaries_from_lengths([[3, 5], [8], [1, 7]]))
    with pytest.raises(SequenceParallelError, match=re.escape("end at 8 tokens, the (padded) sequence has 12")):
        mask.check(length=12, batch=3)
    with pytest.raises(SequenceParallelError, match="boundaries for 3 rows, but the batch has 2: must be 1 or 2"):
        mask.check(length=8, batch=2)
    mask.check(length=8, batch=3)
    AttentionMask(boundaries=boundaries_from_lengths([[3, 5]])).check(length=8, batch=2)
    AttentionMask().check(length=8, batch=2)


def test_boundaries_from_lengths_repeat_the_end_in_shorter_rows():
    assert boundaries_from_lengths([[2, 3, 3], [8]]).tolist() == [[0, 2, 5, 8], [0, 8, 8, 8]]


def test_boundaries_from_positions_begin_a_document_wherever_the_position_does_not_rise_by_one():
    position_ids = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2], [0, 1, 2, 3, 4, 5, 6, 7]])
    assert boundaries_from_positions(position_ids).tolist() == [[0, 3, 5, 8], [0, 8, 8, 8]]
    assert boundaries_from_positions(position_ids[1:]) is None
    assert boundaries_from_positions(torch.tensor([[7, 8, 9, 10]])) is None, "an offset begins no second document"
    assert boundaries_from_positions(torch.tensor([[0, 0, 0]])).tolist() == [[0, 1, 2, 3]]


def test_boundaries_and_positions_agree():
    lengths = [[5, 1, 2], [1, 1, 6]]
    position_ids = torch.tensor([[p for n in row for p in range(n)] for row in lengths])
    boundaries = boundaries_from_positions(position_ids)
    assert torch.equal(boundaries, boundaries_from_lengths(lengths))
    assert document_ids(boundaries, 8).tolist() == [[0, 0, 0, 0, 0, 1, 2, 2], [0, 1, 2, 2, 2, 2, 2, 2]]


@pytest.mark.parametrize(
    ("causal", "position_ids", "boundaries"),
    [
        (True, [*range(5), *range(8)], [[0, 5, 13, 16]]),
        (False, [*range(5), *range(8)], [[0, 5, 13, 16]]),
        (False, [*range(13)], [[0, 13, 16]]),
    ],
)
def test_padding_is_a_document_of_its_own(causal, position_ids, boundaries):
    batch = {"input_ids": torch.zeros(1, 13, dtype=torch.int64), "position_ids": torch.tensor([position_ids])}
    _, info = shard_batch(batch, SequenceLayout(ring_size=2), 0, ShardOptions(packed_documents=True))
    assert info.mask(causal).boundaries.tolist() == boundaries
