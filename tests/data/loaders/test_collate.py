"""Samples become batches: stacked or refused, and fillers without targets."""

from __future__ import annotations

import pytest
import torch

from lightning_sp.data.loaders.collate import Batches, stack
from lightning_sp.data.loaders.fillers import FillerCollate, FillerDataset
from lightning_sp.data.samplers.filler_index import FillerIndex
from lightning_sp.errors import SequenceParallelError
from lightning_sp.labels import IGNORE_INDEX
from lightning_sp.text.windows import Windows
from tests.text.test_windows import corpus_of


def test_a_filler_has_the_sample_without_its_targets():
    batches = Batches(Windows(corpus_of([9, 9]), 4))
    real, filler = batches[[3, 0]], batches[[FillerIndex(~3), FillerIndex(~0)]]
    assert torch.equal(real["input_ids"], filler["input_ids"])
    assert torch.equal(real["position_ids"], filler["position_ids"])
    assert (filler["shift_labels"] == IGNORE_INDEX).all()
    assert (filler["labels"] == IGNORE_INDEX).all()
    assert (real["shift_labels"] != IGNORE_INDEX).all()


def test_a_mask_of_the_loss_is_zero_in_a_filler():
    samples = FillerDataset([{"labels": torch.tensor([3, 4]), "loss_mask": torch.tensor([1, 1])}])
    filler = FillerCollate(stack, trains=True, fillers_come=True)([samples[FillerIndex(~0)]])
    assert len(samples) == 1
    assert filler["labels"].tolist() == [[IGNORE_INDEX] * 2]
    assert filler["loss_mask"].tolist() == [[0, 0]]


def test_targets_without_a_known_name_are_refused_with_the_first_batch():
    samples = FillerDataset([{"x": torch.zeros(2)}])
    assert list(FillerCollate(stack, trains=True, fillers_come=False)([samples[0]])) == ["x"]
    with pytest.raises(SequenceParallelError, match=r"the batch \(\['x'\]\) has no shift_labels, labels, targets"):
        FillerCollate(stack, trains=True, fillers_come=True)([samples[0]])


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
