"""Sequences beside each other in a batch, of steps that see whole sequences: each is cut for itself, and nothing of it is lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_sp import SequenceParallelError
from lightning_sp.data.batch.contents.several_sequences import Named, batch_sequences
from lightning_sp.data.batch.shard_options import ShardOptions
from lightning_sp.data.batch.sharding import shard_batch
from lightning_sp.layout import SequenceLayout, merge

WHOLE = ShardOptions(global_view=True, labels_shifted=True)
LAYOUT = SequenceLayout(ring_size=2)


def tokens(rows: int, length: int) -> torch.Tensor:
    return torch.arange(1, rows * length + 1).view(rows, length)


def pairs(chosen: int = 5, rejected: int = 11, rows_each: int = 1) -> dict[str, Any]:
    """Return a batch of two rows, and of as many times more of the second sequence."""
    return {
        "chosen_input_ids": tokens(2, chosen),
        "chosen_attention_mask": torch.ones(2, chosen, dtype=torch.int64),
        "rejected_input_ids": tokens(2 * rows_each, rejected),
        "rejected_labels": tokens(2 * rows_each, rejected),
        "weight": torch.ones(2),
    }


@pytest.mark.parametrize("rows_each", [1, 3])
def test_each_is_cut_for_itself(rows_each: int) -> None:
    batch = pairs(rows_each=rows_each)
    parts, infos = zip(*(shard_batch(batch, LAYOUT, rank, WHOLE) for rank in range(2)), strict=True)
    (other,) = infos[0].beside
    assert (infos[0].length, infos[0].padded_length, other.length, other.padded_length) == (5, 8, 11, 12)
    assert (infos[0].rows, other.rows) == (2, 2 * rows_each)
    for name, length in (("chosen_input_ids", 5), ("rejected_input_ids", 11), ("rejected_labels", 11)):
        whole = merge([part[name] for part in parts], LAYOUT, dim=1)
        torch.testing.assert_close(whole[:, :length], batch[name])
    assert parts[0]["weight"] is batch["weight"]
    assert infos[0].shape == (2, 8 + rows_each * 12, 5 + rows_each * 11)


def test_names_may_end_with_what_tells_them() -> None:
    batch = {
        "input_ids_chosen": tokens(2, 5),
        "input_ids_rejected": tokens(2, 7),
        "attention_mask_rejected": tokens(2, 7),
    }
    found = batch_sequences(batch, WHOLE)
    assert (found.named, found.own) == (Named(after="_chosen"), {"input_ids_chosen": 1})
    assert found.beside[0].dims == {"input_ids_rejected": 1, "attention_mask_rejected": 1}


def test_standard_names_come_first_and_labels_go_where_they_fit() -> None:
    beside = {"question_input_ids": tokens(2, 5), "passage_input_ids": tokens(2, 7)}
    found = batch_sequences({**beside, "input_ids": tokens(2, 9), "labels": tokens(2, 9)}, WHOLE)
    assert found.own == {"input_ids": 1, "labels": 1}
    assert [each.named.before for each in found.beside] == ["question_", "passage_"]
    found = batch_sequences({**beside, "labels": tokens(2, 7)}, WHOLE)
    assert found.own == {"passage_input_ids": 1, "labels": 1}


def test_one_such_name_is_the_sequence() -> None:
    found = batch_sequences({"text_input_ids": tokens(2, 5), "input_ids": tokens(2, 5)}, WHOLE)
    assert not found.beside


def test_a_decoder_is_told_as_ever() -> None:
    batch = {"encoder_input_ids": tokens(2, 5), "input_ids": tokens(2, 5), "decoder_input_ids": tokens(2, 7)}
    assert not batch_sequences(batch, WHOLE).beside


@pytest.mark.parametrize(
    ("batch", "options", "said"),
    [
        (pairs(), ShardOptions(infer_sequences=True), "2 sequences of different lengths, {'chosen_input_ids': 5, .*global_view=True"),
        ({**pairs(), "rejected_input_ids": tokens(3, 11), "rejected_labels": tokens(3, 11)}, WHOLE, "2 rows of one sequence and 3 of another"),
        ({**pairs(), "rejected_labels": tokens(2, 10)}, WHOLE, "different lengths {'rejected_input_ids': 11, 'rejected_labels': 10}"),
        (
            {**pairs(), "rejected_position_ids": torch.arange(11).remainder(6).expand(2, -1)},
            ShardOptions(global_view=True, packed_documents=True),
            "rejected_position_ids of a batch of several sequences do not rise by one",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_told_apart_is_refused(batch: dict[str, Any], options: ShardOptions, said: str) -> None:
    with pytest.raises(SequenceParallelError, match=said.replace("{", r"\{")):
        shard_batch(batch, LAYOUT, 0, options)


def test_equal_lengths_stay_one_sequence_of_a_part() -> None:
    _, info = shard_batch(pairs(8, 8), LAYOUT, 0, ShardOptions(infer_sequences=True))
    assert not info.beside
    assert info.dims.keys() >= {"chosen_input_ids", "rejected_input_ids"}


def test_what_is_as_long_as_an_encoders_sequence_is_of_it_where_no_name_says_so() -> None:
    """UDOP's boxes, Pix2Struct's patches; as long as the decoder's alone they are refused."""
    batch = {"input_ids": tokens(2, 9), "bbox": torch.zeros(2, 9, 4), "decoder_input_ids": tokens(2, 5)}
    found = batch_sequences(batch, WHOLE)
    assert (found.encoder, found.own) == ({"input_ids": 1, "bbox": 1}, {"decoder_input_ids": 1})
    parts = [shard_batch(batch, LAYOUT, rank, WHOLE)[0] for rank in range(2)]
    assert merge([part["bbox"] for part in parts], LAYOUT, dim=1)[:, :9].shape == (2, 9, 4)
    with pytest.raises(SequenceParallelError, match=r"'bbox': \(2, 9, 4\)\} of the batch look like sequences of 9"):
        shard_batch(batch, LAYOUT, 0, ShardOptions(labels_shifted=True))
    with pytest.raises(SequenceParallelError, match=r"'bbox': \(2, 5, 4\)\} of the batch look like sequences of 5"):
        shard_batch({**batch, "bbox": torch.zeros(2, 5, 4)}, LAYOUT, 0, WHOLE)
