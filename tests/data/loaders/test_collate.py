"""Samples become batches: stacked or refused, and fillers with a mark."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from lightning_sp.data.batch.filler_marks import ignore_beside_others, is_filler_batch, marked, without_mark
from lightning_sp.data.loaders.collate import Batches, stack
from lightning_sp.data.loaders.fillers import FillerCollate, FillerDataset
from lightning_sp.data.samplers.filler_index import FillerIndex
from lightning_sp.errors import SequenceParallelError
from lightning_sp.labels import IGNORE_INDEX
from lightning_sp.text.windows import Windows
from tests.text.test_windows import corpus_of


def test_a_filler_is_its_sample_with_a_mark():
    batches = Batches(Windows(corpus_of([9, 9]), 4))
    real, filler = batches[[3, 0]], batches[[FillerIndex(~3), FillerIndex(~0)]]
    assert all(torch.equal(real[name], filler[name]) for name in real)
    assert is_filler_batch(filler)
    assert not is_filler_batch(real)


@pytest.mark.parametrize("kind", [list, tuple])
def test_what_has_no_names_has_a_mark_too(kind):
    samples = FillerDataset([torch.zeros(2)])
    filler = FillerCollate(kind, trains=True, fillers_come=True)([samples[FillerIndex(~0)]])
    assert isinstance(filler, kind)
    assert is_filler_batch(filler)
    assert type(without_mark(filler)) is kind


def test_targets_of_fillers_beside_another_loaders_samples_are_ignored():
    given = {"labels": torch.tensor([3, 4]), "loss_mask": torch.tensor([1, 1])}
    batch = {"a": marked(given), "b": {"labels": torch.tensor([5])}}
    ignore_beside_others(batch)
    assert batch["a"]["labels"].tolist() == [IGNORE_INDEX] * 2
    assert batch["a"]["loss_mask"].tolist() == [0, 0]
    assert batch["b"]["labels"].tolist() == [5]
    assert given["labels"].tolist() == [3, 4]
    with pytest.raises(SequenceParallelError, match=r"its batch \(\['x'\]\) has no shift_labels, labels, targets"):
        ignore_beside_others([marked({"x": torch.zeros(2)}), {}])


def test_a_batch_that_can_have_no_mark_is_refused_with_the_first_one():
    samples = FillerDataset([torch.zeros(2)])
    collate = partial(FillerCollate, torch.stack, trains=True)
    assert collate(fillers_come=False)([samples[0]]).shape == (1, 2)
    with pytest.raises(SequenceParallelError, match="can have no mark as a Tensor: use drop_last=True"):
        collate(fillers_come=True)([samples[0]])


def test_a_filler_of_an_evaluation_needs_no_targets():
    samples = FillerDataset([{"x": torch.zeros(2)}])
    assert list(FillerCollate(stack, trains=False)([samples[FillerIndex(~0)]])) == ["x"]


def test_batches_are_stacked_or_refused():
    batch = Batches(Windows(corpus_of([9, 9]), 4))[[0, 2]]
    assert batch["input_ids"].tolist() == [[100, 101, 102, 103], [200, 201, 202, 203]]
    assert batch["shift_labels"].tolist() == [[101, 102, 103, 104], [201, 202, 203, 204]]
    with pytest.raises(SequenceParallelError, match=r"x of sample 1 has shape \(3,\), of sample 0 \(2,\)"):
        stack([{"x": torch.zeros(2)}, {"x": torch.zeros(3)}])
    with pytest.raises(SequenceParallelError, match=r"sample 1 of a batch has \['y'\], sample 0 has \['x'\]"):
        stack([{"x": torch.zeros(2)}, {"y": torch.zeros(2)}])
    with pytest.raises(SequenceParallelError, match="at least one sample"):
        stack([])
