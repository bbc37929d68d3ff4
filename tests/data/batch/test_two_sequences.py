"""Batches of an encoder-decoder: which entries are of which sequence, how they are told apart, and what is refused."""

from __future__ import annotations

import pytest
import torch

from lightning_sp import SequenceParallelError
from lightning_sp.data.batch.hand_sharded import hand_sharded_info
from lightning_sp.data.batch.shard_options import ShardOptions
from lightning_sp.data.batch.sharding import shard_batch
from lightning_sp.layout import SequenceLayout, merge
from lightning_sp.preflight.crops.crop import crop_batch, crop_extent

LAYOUT = SequenceLayout(ring_size=2)  # lengths are multiples of 4


def batch_of(read: int, written: int, rows: int = 2, **others: torch.Tensor) -> dict[str, torch.Tensor]:
    ids = torch.arange(1, 1 + rows * (read + written)).reshape(rows, -1)
    held = {"input_ids": ids[:, :read], "decoder_input_ids": ids[:, read:], "labels": ids[:, read:] + 1}
    return {**held, **others}


LABELED = ShardOptions(labels_shifted=True)


def shards(batch, options=LABELED):
    return zip(*(shard_batch(batch, LAYOUT, rank, options) for rank in range(LAYOUT.size)), strict=True)


def test_each_sequence_is_sharded_by_its_own_length():
    batch = batch_of(29, 16)
    parts, infos = shards(batch)
    info = infos[0]
    assert (info.length, info.padded_length, info.encoder.length, info.encoder.padded_length) == (16, 16, 29, 32)
    for name, length in (("input_ids", 29), ("decoder_input_ids", 16), ("labels", 16)):
        whole = merge(torch.stack([part[name] for part in parts]), LAYOUT, dim=1)
        assert torch.equal(whole[:, :length], batch[name])
    places = merge(torch.stack([part["decoder_position_ids"] for part in parts]), LAYOUT, dim=1)
    assert torch.equal(places, torch.arange(16).expand(2, -1))
    assert parts[0]["position_ids"].shape == (2, 16)
    assert torch.equal(infos[1].shift_labels, parts[1]["labels"])


@pytest.mark.parametrize(
    ("read", "written", "hidden", "expected"),
    [
        (32, 32, False, 32),  # nothing tells them apart, and nothing needs to
        (32, 32, True, 36),
        (30, 32, False, 36),
        (32, 30, False, 36),
        (29, 40, True, 32),
    ],
)
def test_sequences_are_told_apart_by_their_lengths_where_their_masks_differ(read, written, hidden, expected):
    mask = torch.ones(2, read, dtype=torch.int64)
    mask[0, -3:] = 0
    batch = batch_of(read, written, **({"attention_mask": mask} if hidden else {}))
    _, (info, _) = shards(batch)
    assert info.encoder.padded_length == expected
    alone = shard_batch(batch, SequenceLayout(), 0, ShardOptions(labels_shifted=True, apart=False))[1]
    assert (alone.padded_length, alone.encoder.padded_length) == (written, read), "a whole run needs no padding"


def test_a_decoders_input_is_made_of_whole_labels():
    batch = batch_of(29, 16)
    expected = batch.pop("decoder_input_ids")
    options = ShardOptions(labels_shifted=True, decoder_inputs=lambda labels: labels - 1)
    parts, infos = shards(batch, options)
    assert torch.equal(merge(torch.stack([p["decoder_input_ids"] for p in parts]), LAYOUT, dim=1), expected)
    assert "decoder_position_ids" not in parts[0], "such a model is handed its positions"
    assert infos[0].encoder.length == 29


def test_declared_names_of_a_decoder():
    batch = {
        "source": torch.zeros(2, 12),
        "decoder_target": torch.zeros(2, 8),
        "targets": torch.zeros(2, 8, dtype=torch.int64),
    }
    options = ShardOptions({"source": 1, "decoder_target": 1})
    parts, infos = shards(batch, options)
    assert {n: t.shape[1] for n, t in parts[0].items()} == {
        "source": 6, "decoder_target": 4, "targets": 4, "position_ids": 6, "decoder_position_ids": 4
    }  # fmt: skip
    assert infos[0].shift_labels.shape == (2, 4)


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ({**batch_of(12, 8), "labels": torch.zeros(2, 12, dtype=torch.int64)}, "different lengths {'decoder_input_ids': 8, 'labels': 12}"),
        ({**batch_of(12, 8), "input_ids": torch.zeros(3, 12, dtype=torch.int64)}, "3 rows of the encoder and 2 of the decoder"),
        ({"decoder_input_ids": torch.zeros(2, 8)}, "which are a decoder's, and nothing that an encoder reads"),
        ({"input_ids": torch.zeros(2, 12), "labels": torch.ones(2, 8).long()}, "encoder-decoder batch names its decoder's decoder_input_ids"),
        (batch_of(12, 8, weights=torch.zeros(2, 12)), "look like sequences of 12 tokens"),
        (batch_of(12, 8, weights=torch.zeros(2, 12)), "dim 1 in the collate function: weights.unsqueeze(1)"),
        (batch_of(12, 8, position_ids=torch.arange(12).remainder(5).expand(2, -1)), "packed documents are carried for one sequence alone"),
    ],
)  # fmt: skip
def test_what_is_refused(batch, said):
    with pytest.raises(SequenceParallelError) as refusal:
        shard_batch(batch, LAYOUT, 0, ShardOptions(labels_shifted=True, packed_documents=True))
    assert said in str(refusal.value)


def test_two_sequences_cannot_be_sharded_by_hand():
    with pytest.raises(SequenceParallelError, match="cannot be sharded by hand"):
        hand_sharded_info(batch_of(8, 4), LAYOUT, 0, ShardOptions(labels_shifted=True))


def test_a_crop_has_a_window_of_each():
    labels = torch.full((2, 300), -100)
    labels[:, 250] = 7
    mask = torch.ones(2, 400, dtype=torch.int64)
    mask[1, :200] = 0
    batch = {**batch_of(400, 300), "labels": labels, "attention_mask": mask, "pairs": torch.ones(2, 1, 300, 400)}
    options = ShardOptions(labels_shifted=True)
    size = crop_extent(batch, options, LAYOUT)
    assert size == (2, 64, 64)
    crop = crop_batch(batch, options, size).batch
    assert {n: tuple(t.shape) for n, t in crop.items()} == {
        "input_ids": (2, 64), "decoder_input_ids": (2, 64), "labels": (2, 64), "attention_mask": (2, 64), "pairs": (2, 1, 64, 64)
    }  # fmt: skip
    assert bool((crop["labels"] == 7).any())
    assert bool(crop["attention_mask"].all()), "the window that padding leaves most of"


SOUNDS = {
    "input_features": torch.zeros(2, 16, 40),  # as many features as the decoder has tokens
    "attention_mask": torch.ones(2, 40, dtype=torch.int64),
    "labels": torch.arange(32).reshape(2, 16),
    "decoder_input_ids": torch.arange(32).reshape(2, 16),
}


def test_sounds_beside_a_decoders_sequence_pass_whole_with_their_mask():
    parts, infos = shards(SOUNDS)
    info = infos[0]
    assert (info.length, info.encoder, info.encoder_is_whole, info.has_attention_mask) == (16, None, True, False)
    assert info.other_inputs == ("input_features (2, 16, 40)",)
    assert all(part[name] is SOUNDS[name] for part in parts for name in ("input_features", "attention_mask"))
    assert {n: t.shape[1] for n, t in parts[0].items()} == {
        "input_features": 16, "attention_mask": 40, "labels": 8, "decoder_input_ids": 8, "decoder_position_ids": 8
    }  # fmt: skip
    samples = {"input_values": torch.zeros(2, 640), "decoder_input_ids": SOUNDS["decoder_input_ids"]}
    assert shard_batch(samples, LAYOUT, 0, LABELED)[1].other_inputs == ("input_values (2, 640)",)
    size = crop_extent(
        {**SOUNDS, "labels": torch.zeros(2, 80).long(), "decoder_input_ids": torch.zeros(2, 80)}, LABELED, LAYOUT
    )
    assert size == (2, 64), "the frames are no second sequence"


def test_what_sounds_do_not_explain_is_refused():
    with pytest.raises(SequenceParallelError, match=r"\{'weights': \(2, 16\)\} of the batch look like sequences of 16"):
        shard_batch({**SOUNDS, "weights": torch.zeros(2, 16)}, LAYOUT, 0, LABELED)
    with pytest.raises(SequenceParallelError, match="input_features, attention_mask of an encoder and labels"):
        hand_sharded_info(SOUNDS, LAYOUT, 0, LABELED)


def test_targets_of_codebooks_have_their_tokens_last():
    """Dia's: a decoder reads (rows, tokens, codebooks), and its targets are (rows, codebooks, tokens)."""
    batch = {
        "input_ids": torch.ones(2, 12, dtype=torch.int64),
        "decoder_input_ids": torch.ones(2, 8, 3, dtype=torch.int64),
        "labels": torch.arange(48).view(2, 3, 8),
    }
    parts, infos = shards(batch)
    assert infos[0].length == 8
    assert torch.equal(merge(torch.stack([part["labels"] for part in parts]), LAYOUT, dim=2), batch["labels"])
