"""Which entries of a batch carry the sequence: by their names and shapes; and a batch that holds none."""

from __future__ import annotations

import pytest
import torch

from lightning_sp.data.batch.contents.entries import extent, named_dims, pairs_of_tokens, sequence_dims
from lightning_sp.data.batch.contents.several_sequences import batch_sequences
from lightning_sp.data.batch.shard_options import ShardOptions
from lightning_sp.data.batch.sharding import shard_batch
from lightning_sp.errors import SequenceParallelError
from lightning_sp.layout import SequenceLayout
from lightning_sp.preflight.crops.crop import crop_batch

IDS = torch.arange(12).view(2, 6)
IMAGES = {"pixel_values": torch.zeros(2, 3, 4, 4), "labels": torch.tensor([0, 1])}


@pytest.mark.parametrize("name", ["loss_weights", "target_mask", "seq_idx", "mm_token_type_ids", "loss_mask"])
def test_weights_and_marks_of_tokens_are_known_by_name(name):
    assert sequence_dims({"input_ids": IDS, name: torch.ones(2, 6)}, ShardOptions()) == {"input_ids": 1, name: 1}


@pytest.mark.parametrize(
    "row",
    [("labels", (2,)), ("loss_weights", (2,)), ("loss_weights", (2, 1)), ("target_mask", (2, 1)), ("labels", (2, 3))],
)
def test_what_says_of_rows_passes_whole(row):
    name, shape = row
    assert sequence_dims({"input_ids": IDS, name: torch.ones(shape)}, ShardOptions()) == {"input_ids": 1}


def test_labels_of_tokens_are_a_sequence_whatever_their_dtype():
    for labels in (torch.ones(2, 6), torch.ones(2, 6, dtype=torch.int64), torch.ones(2, 6, 3)):
        assert sequence_dims({"input_ids": IDS, "labels": labels}, ShardOptions()) == {"input_ids": 1, "labels": 1}
    # Whole numbers of another length are no classes of a row: a mistake.
    assert "labels" in sequence_dims({"input_ids": IDS, "labels": torch.ones(2, 3, dtype=torch.int64)}, ShardOptions())


@pytest.mark.parametrize(
    "targets", [torch.tensor([0, 1]), torch.ones(2, 5), torch.ones(2)], ids=["classes", "several", "numbers"]
)
@pytest.mark.parametrize("name", ["targets", "labels"])
def test_what_is_wanted_of_rows_is_no_target_of_a_token(name, targets):
    batch = {"input_ids": IDS, name: targets}
    for options in (ShardOptions(), ShardOptions(global_view=True)):
        local, info = shard_batch(batch, SequenceLayout(ring_size=2), 0, options)
        assert info.shift_labels is None
        assert local[name] is targets
        crop = crop_batch(batch, options, (2, 4))
        assert crop.num_targets is None
        assert torch.equal(crop.batch[name], targets)


def test_a_list_beside_rows_passes_whole_and_a_list_of_rows_is_refused():
    spans = {"spans.0": torch.tensor([1, 2]), "spans.1": torch.tensor([3])}
    assert sequence_dims({"input_ids": IDS, **spans}, ShardOptions()) == {"input_ids": 1}
    rows = {"input_ids.0": torch.arange(3), "input_ids.1": torch.arange(4)}
    for batch in (rows, {**rows, "pixel_values": torch.zeros(2, 3, 4, 4)}, {**spans, "labels": torch.zeros(2)}):
        with pytest.raises(SequenceParallelError, match=r"is a list of 2 rows, of \["):
            sequence_dims(batch, ShardOptions())


def test_a_batch_of_names_that_are_not_known_passes_whole_where_none_is_split():
    batch = {"x": torch.zeros(2, 6, 4), "y": torch.zeros(2)}
    local, info = shard_batch(batch, SequenceLayout(), 0, ShardOptions())
    assert local is batch
    assert (info.rows, info.length, info.position_ids, info.is_whole) == (2, 1, None, False)
    with pytest.raises(SequenceParallelError, match=r"no sequence dimension.*or train without splitting sequences"):
        shard_batch(batch, SequenceLayout(2, 1), 0, ShardOptions())


@pytest.mark.parametrize("shape", [(0, 6), (2, 0)])
def test_a_batch_without_tokens_is_refused(shape):
    with pytest.raises(
        SequenceParallelError, match=r"^the batch holds no tokens in \['input_ids'\]: it holds input_ids: \("
    ):
        shard_batch({"input_ids": IDS.new_zeros(shape)}, SequenceLayout(2, 1), 0, ShardOptions())


def test_nested_tensors_are_refused():
    rows = torch.nested.nested_tensor([torch.ones(3), torch.ones(5)], layout=torch.jagged)
    with pytest.raises(SequenceParallelError, match=r"^the batch's entries \['x'\] are nested tensors, whose rows"):
        shard_batch({"input_ids": IDS, "x": rows}, SequenceLayout(2, 1), 0, ShardOptions())


@pytest.mark.parametrize(
    ("batch", "found"),
    [
        ({"0": IDS, "1": IDS}, {"0": 1, "1": 1}),
        ({"x": torch.zeros(2, 6, 4), "y": IDS, "keep": IDS > 3}, {"x": 1, "y": 1, "keep": 1}),
        ({"input_ids": IDS, "weights": torch.ones(2, 6), "row": torch.ones(2, 5)}, {"input_ids": 1, "weights": 1}),
        # Where no name is known: features, codes whose tokens are last, a series; of these the first that there is.
        ({"past": torch.zeros(2, 6, 3), "ahead": torch.zeros(2, 4, 3), "class": torch.zeros(2)}, {"past": 1}),
        ({"codes": torch.zeros(2, 4, 6, dtype=torch.int64), "text": torch.zeros(2, 5, 8)}, {"codes": 2}),
        ({"0": torch.zeros(2, 6), "1": torch.zeros(2, 3)}, {"0": 1}),
        ({"past": torch.zeros(2, 6, 1), "ahead": torch.zeros(2, 4, 1), "fixed": torch.zeros(2, 3)}, {"past": 1}),
        (
            {"audio": torch.zeros(2, 1, 6), "class": torch.zeros(2), "mask": torch.ones(2, 1, 6)},
            {"audio": 2, "mask": 2},
        ),
        ({"0": torch.zeros(2, 6), "1": torch.zeros(2, 1, 5)}, {"0": 1}),
        ({"one": torch.zeros(2, 1, 1), "two": torch.zeros(2, 1, 6, dtype=torch.int64), "class": torch.zeros(2)}, {}),
        # A mask of queries and keys; images; a decoder's sequence, or the encoder's.
        ({"input_ids": IDS, "mask": torch.ones(2, 6, 6)}, {"input_ids": 1}),
        (IMAGES, {}),
        ({"input_ids": IDS, "decoder_input_ids": IDS, "x": IDS}, {"input_ids": 1, "decoder_input_ids": 1}),
    ],
)
def test_other_names_are_inferred_by_shape_where_a_preflight_tries_them(batch, found):
    assert named_dims(batch, ShardOptions(infer_sequences=True)) == found
    known = {name: dim for name, dim in found.items() if name.endswith("input_ids")}
    assert named_dims(batch, ShardOptions()) == known


def test_an_entry_that_was_of_another_length_is_no_sequence_when_it_is_as_long():
    entries = {"input_ids": IDS, "classes": torch.ones(2, 6)}
    unknown = batch_sequences(entries, ShardOptions())
    with pytest.raises(SequenceParallelError, match="look like sequences of 6 tokens"):
        extent(entries, unknown.own, unknown.others(unknown.own))
    for options in (
        ShardOptions(whole_entries={"classes"}),
        ShardOptions(whole_entries={"classes"}, infer_sequences=True),
    ):
        batch = batch_sequences(entries, options)
        assert batch.own == {"input_ids": 1}
        assert extent(entries, batch.own, batch.others(batch.own)) == (2, 6)


@pytest.mark.parametrize("name", ["input_ids", "0"])
def test_an_entry_that_was_as_long_once_shows_its_whole(name):
    entries, inferred = {name: IDS, "classes": torch.ones(2, 5), "mask": IDS > 2}, {"0": 1, "classes": 1, "mask": 1}
    found = named_dims(entries, ShardOptions(inferred_dims=inferred, global_view=True))
    assert found == {name: 1, "mask": 1}
    assert named_dims(entries, ShardOptions(inferred_dims=inferred)) == {name: 1, "classes": 1, "mask": 1}


def test_a_dim_may_be_counted_from_the_end():
    entries = {"input_ids": IDS, "heights": torch.ones(2, 3, 6)}
    assert sequence_dims(entries, ShardOptions(sequence_dims={"heights": -1})) == {"input_ids": 1, "heights": 2}
    with pytest.raises(SequenceParallelError, match=r"sequence_dims\['heights'\]=-4: the batch has \(2, 3, 6\)"):
        sequence_dims(entries, ShardOptions(sequence_dims={"heights": -4}))


def test_pairs_of_tokens_pass_whole_where_the_step_sees_whole_sequences():
    square, edges = torch.ones(6, 6), torch.zeros(2, 6, 6, 3)
    entries = {
        "input_ids": IDS,
        "near": square,
        "edges": edges,
        "row": torch.ones(2, 5),
        "heads": torch.ones(2, 4, 6, 6),
    }
    whole = ShardOptions(global_view=True)
    assert pairs_of_tokens(entries, {"input_ids": 1}, whole) == ["near", "edges"]
    assert pairs_of_tokens(entries, {"input_ids": 1}, ShardOptions()) == ["near"]
    assert pairs_of_tokens({**entries, "near": torch.ones(2, 6)}, {"input_ids": 1}, ShardOptions()) == [], (
        "rows of tokens"
    )
    with pytest.raises(
        SequenceParallelError, match=r"if edges is of pairs of tokens, global_view=True carries it whole; say"
    ):
        extent(entries, {"input_ids": 1})
    batch, _ = shard_batch(entries, SequenceLayout(ring_size=2), 1, whole)
    assert batch["edges"] is edges
    assert batch["near"] is square


def test_a_declared_entry_of_other_batches_may_be_absent_where_no_other_entry_may_be_meant():
    options = ShardOptions(sequence_dims={"weights": 1})
    assert sequence_dims({"input_ids": IDS, "of_row": torch.ones(2)}, options) == {"input_ids": 1}
    assert sequence_dims({"input_ids": IDS, "weights": torch.ones(2, 6)}, options) == {"input_ids": 1, "weights": 1}
    for others in ({"weight": torch.ones(2, 6)}, {"weights": 1.0}):
        with pytest.raises(
            SequenceParallelError, match=r"sequence_dims\['weights'\]=1: the batch has (NoneType|float)"
        ):
            sequence_dims({"input_ids": IDS, **others}, options)
