"""The mask as a value: what it refuses, and how documents become boundaries."""

from __future__ import annotations

import re

import pytest
import torch

from lightning_sp.attention import AttentionMask, boundaries_from_lengths, boundaries_from_positions
from lightning_sp.attention.spec.codec import AttentionSpec, decode, encode
from lightning_sp.attention.spec.documents import document_ids
from lightning_sp.attention.spec.scores import Scores
from lightning_sp.config import AttentionOptions
from lightning_sp.context.masks import build_mask
from lightning_sp.data.batch.shard_options import ShardOptions
from lightning_sp.data.batch.sharding import shard_batch
from lightning_sp.errors import SequenceParallelError
from lightning_sp.layout import SequenceLayout
from tests.drawn_cases import masks


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(window_size=(-1, None)), "window_size=(-1, None): two numbers of tokens before and after a query"),
        (dict(chunk_size=0), "chunk_size=0: must be at least 1 token"),
        (dict(valid=torch.tensor([[4, 2]])), "valid [[4, 2]]: runs [start, end) must rise from 0"),
        (dict(valid=torch.tensor([4, 2])), "valid of shape (2,), torch.int64 on cpu: must be int64 on the CPU, (rows, 2)"),
        (dict(bidirectional=torch.tensor([[[0, 4], [2, 6]]])), "bidirectional [[[0, 4], [2, 6]]]: runs [start, end) must rise"),
        (dict(bidirectional=torch.tensor([[-1, 4]])), "bidirectional of shape (1, 2)"),
    ],
)  # fmt: skip
def test_contradictory_options_are_refused(options, message):
    with pytest.raises(SequenceParallelError, match=re.escape(message)):
        AttentionMask(**options)


def test_runs_beyond_the_sequence_or_of_other_rows_are_refused():
    with pytest.raises(SequenceParallelError, match="tokens end at 9, the \\(padded\\) sequence has 8"):
        AttentionMask(valid=torch.tensor([[0, 9]])).check(length=8, batch=1)
    with pytest.raises(SequenceParallelError, match="bidirectional for 3 rows, but the batch has 2"):
        AttentionMask(bidirectional=torch.zeros(3, 1, 2, dtype=torch.int64)).check(length=8, batch=2)


@pytest.mark.parametrize("name", masks.NAMED)
def test_a_mask_survives_its_way_into_the_operator(name):
    mask = masks.build(masks.NAMED[name], 32, 32)
    given = AttentionSpec(
        mask=mask, layout_table=None, scores=Scores(), sinks=None, scale=1.0, options=AttentionOptions()
    )
    back = decode(encode(given)).mask
    assert (back.causal, back.window_size, back.chunk_size) == (mask.causal, mask.window_size, mask.chunk_size)
    for each in ("boundaries", "valid", "bidirectional"):
        given, found = getattr(mask, each), getattr(back, each)
        assert given is found if given is None else torch.equal(given, found)


@pytest.mark.parametrize(
    ("rows", "valid"),
    [([[1, 1, 1, 1]], None), ([[0, 0, 1, 1], [1, 1, 1, 0]], [[2, 4], [0, 3]]), ([[0, 0, 0, 0], [1, 1, 1, 1]], [[0, 0], [0, 4]])],
)  # fmt: skip
def test_padding_masks_become_runs_of_keys(rows, valid):
    batch = {"input_ids": torch.zeros(len(rows), 4, dtype=torch.int64), "attention_mask": torch.tensor(rows)}
    _, info = shard_batch(batch, SequenceLayout(ring_size=2), 0, ShardOptions(model_shifts_labels=True))
    assert info.has_attention_mask
    assert (None if info.valid is None else info.valid.tolist()) == valid
    assert build_mask(info, info, causal=True).valid is None, "a model that hides no padding is not made to"
    assert build_mask(info, info, causal=True, hides_padding=True).valid is info.valid


def test_padding_masks_with_holes_are_kept_whole_and_those_of_pairs_pass_as_they_are():
    rows = torch.tensor([[1, 0, 1, 1, 1], [1, 1, 1, 0, 0]])
    batch = {"input_ids": torch.zeros(2, 5, dtype=torch.int64), "attention_mask": rows}
    local, info = shard_batch(batch, SequenceLayout(ring_size=2), 1, ShardOptions())
    assert info.has_attention_mask
    assert info.hides_keys
    assert info.valid is None
    assert build_mask(info, info, causal=False).dense is None, "a model that hides no padding is not made to"
    padded = torch.nn.functional.pad(rows.bool(), (0, 3))
    assert torch.equal(build_mask(info, info, causal=False, hides_padding=True).dense, padded[:, None, None]), (
        "our own padding is not seen"
    )
    assert local["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 0, 0, 1]], "of tokens 2 to 5, padding of ours seen"
    pairs = torch.ones(2, 1, 5, 5, dtype=torch.bool)
    local, info = shard_batch({**batch, "attention_mask": pairs}, SequenceLayout(ring_size=2), 1, ShardOptions())
    assert local["attention_mask"] is pairs
    assert not info.has_attention_mask


def test_boundaries_from_lengths_repeat_the_end_in_shorter_rows():
    assert boundaries_from_lengths([[2, 3, 3], [8]]).tolist() == [[0, 2, 5, 8], [0, 8, 8, 8]]


def test_boundaries_from_positions_begin_a_document_wherever_the_position_does_not_rise_by_one():
    position_ids = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2], [0, 1, 2, 3, 4, 5, 6, 7]])
    assert boundaries_from_positions(position_ids).tolist() == [[0, 3, 5, 8], [0, 8, 8, 8]]
    assert boundaries_from_positions(position_ids[1:]) is None
    assert boundaries_from_positions(torch.tensor([[0, 1, 5, 6]])).tolist() == [[0, 2, 4]]  # a leap, too
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
    assert build_mask(info, info, causal=causal).boundaries.tolist() == boundaries
