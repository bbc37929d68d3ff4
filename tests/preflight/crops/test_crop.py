"""A crop of a batch: its length, its targets, the edge of two documents."""

from __future__ import annotations

import pytest
import torch

from lightning_sp.data.batch.shard_options import ShardOptions
from lightning_sp.layout import SequenceLayout
from lightning_sp.preflight.crops.crop import Crop, crop_batch, crop_extent, crop_tokens
from lightning_sp.preflight.crops.shared_crop import join_crops


@pytest.mark.parametrize(
    ("length", "layout", "wanted", "tokens"),
    [
        (8192, (2, 2), None, 64),
        (8191, (2, 2), None, 63),
        (40, (2, 1), None, 40),
        (8192, (8, 2), None, 128),
        (8190, (1, 4), 5, 6),
        (9, (1, 4), 100, 9),
    ],
)
def test_a_crop_is_padded_as_the_sequence_is(length, layout, wanted, tokens):
    layout = SequenceLayout(*layout)
    assert crop_tokens(length, layout, wanted) == tokens
    assert layout.padded_length(tokens) - tokens == layout.padded_length(length) - length


def test_a_crop_holds_targets_and_the_edge_of_two_documents():
    ids = torch.arange(4 * 200).view(4, 200)
    labels = torch.full((4, 200), -100)
    labels[3, 199] = 1
    places = torch.cat([torch.arange(130), torch.arange(70)]).expand(4, 200)
    batch = {"input_ids": ids, "shift_labels": labels, "names": ["a", "b", "c", "d"], "scale": torch.tensor(3.0)}
    extent = crop_extent(batch, ShardOptions(), SequenceLayout(2, 1))
    crop = crop_batch(batch, ShardOptions(), extent)
    assert (crop.rows, crop.tokens, crop.num_targets) == (2, 64, 1)
    assert torch.equal(crop.batch["input_ids"], ids[2:, 136:])
    assert crop.batch["names"] == ["c", "d"]
    assert crop.batch["scale"] == 3
    assert crop.batch["input_ids"].untyped_storage().nbytes() == 2 * 64 * 8, "a copy, not a view of the whole batch"
    labels[0, 100] = 1
    edge = crop_batch({**batch, "position_ids": places}, ShardOptions(), extent)
    assert torch.equal(edge.batch["input_ids"], ids[:2, 98:162])
    assert edge.batch["position_ids"][0, 31:33].tolist() == [129, 0]
    labels[:] = -100
    assert crop_batch(batch, ShardOptions(), extent).num_targets == 0
    labels[2, 0] = 1
    three = {"input_ids": ids[:3], "shift_labels": labels[:3]}
    assert torch.equal(crop_batch(three, ShardOptions(), extent).batch["input_ids"], ids[1:3, :64]), (
        "always as many rows"
    )


def test_a_row_keeps_the_token_that_it_is_classified_by():
    ids = torch.arange(2 * 200).view(2, 200) + 10
    mask = torch.ones_like(ids)
    mask[1, 40:] = 0
    batch = {"input_ids": ids.clone(), "attention_mask": mask, "labels": torch.tensor([0, 1])}
    batch["input_ids"][0, 199] = batch["input_ids"][1, 39] = 2
    options = ShardOptions(row_end=2)
    found = crop_batch(batch, options, crop_extent(batch, options, SequenceLayout(2, 1))).batch["input_ids"]
    assert found.shape == (2, 64)
    assert (found == 2).nonzero().tolist() == [[0, 63], [1, 39]]
    assert batch["input_ids"][0, 63] != 2, "the batch itself is left as it is"


def test_each_sequence_has_a_window_of_its_own_rows_and_tokens():
    passages = torch.arange(8 * 300).view(8, 300)
    mask = torch.ones_like(passages)
    mask[:, :200] = 0
    batch = {
        "question_input_ids": torch.arange(4 * 90).view(4, 90), "passage_input_ids": passages, "passage_attention_mask": mask,
    }  # fmt: skip
    options = ShardOptions(global_view=True)
    extent = crop_extent(batch, options, SequenceLayout(2, 1))
    assert extent == (2, 62, 64)
    crop = crop_batch(batch, options, extent)
    assert torch.equal(crop.batch["question_input_ids"], batch["question_input_ids"][:2, :62])
    assert torch.equal(crop.batch["passage_input_ids"], passages[:4, 236:]), (
        "two for each row, where padding leaves most"
    )


def test_crops_of_groups_join_all_rows_of_each_sequence():
    options = ShardOptions(global_view=True)
    crops = [
        Crop(batch={"a_input_ids": torch.full((2, 6), n), "b_input_ids": torch.full((4, 8), n)}, rows=2, tokens=6, num_targets=None)
        for n in (1, 2)
    ]  # fmt: skip
    joined = join_crops(crops, options).batch
    assert {name: value[:, 0].tolist() for name, value in joined.items()} == {
        "a_input_ids": [1, 1, 2, 2],
        "b_input_ids": [1] * 4 + [2] * 4,
    }


def test_pairs_of_tokens_are_cut_along_both_dims():
    labels = torch.full((2, 200), -100)
    labels[:, 70] = 1
    pairs = torch.arange(200 * 200).view(200, 200)
    batch = {"input_ids": labels, "shift_labels": labels, "near": pairs, "edges": torch.stack([pairs, -pairs])}
    whole = ShardOptions(global_view=True)
    crop = crop_batch(batch, whole, crop_extent(batch, whole, SequenceLayout(2, 1)))
    assert torch.equal(crop.batch["near"], pairs[64:128, 64:128])
    assert torch.equal(crop.batch["edges"], batch["edges"][:, 64:128, 64:128])
