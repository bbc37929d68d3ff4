"""Samples -> a batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.utils.data import Dataset

from lightning_sp.data.loaders.fillers import FillerCollate, FillerDataset
from lightning_sp.errors import SequenceParallelError
from lightning_sp.text.windows import Sample


class Batches(Dataset[Sample]):
    """The whole batch for a list of indices: for loaders whose sampler yields lists (``batch_size=None``).

    Args:
        dataset: map style, its samples dicts of tensors.
    """

    def __init__(self, dataset: Dataset[Sample]) -> None:
        self.dataset = FillerDataset(dataset)
        self.collate = FillerCollate(stack, trains=True)

    def __getitem__(self, indices: list[int]) -> Sample:
        """Return the stacked samples; for indices ``~i`` their targets are ignored."""
        batch: Sample = self.collate([self.dataset[index] for index in indices])
        return batch


def stack(samples: Sequence[Sample]) -> Sample:
    """Stack samples of equal keys and lengths along a new first dim.

    Raises:
        SequenceParallelError: With the keys or shapes that differ.
    """
    if not samples:
        raise SequenceParallelError(
            "a batch needs at least one sample, got none: let the batch sampler yield no empty list"
        )
    first = samples[0]
    for i, sample in enumerate(samples[1:], start=1):
        if sample.keys() != first.keys():
            raise SequenceParallelError(
                f"sample {i} of a batch has {sorted(sample)}, sample 0 has {sorted(first)}: samples of a batch must have the same entries; "
                "let the dataset return them all for each sample, or give a collate_fn"
            )
        for key, tensor in sample.items():
            if tensor.shape != first[key].shape:
                raise SequenceParallelError(
                    f"{key} of sample {i} has shape {tuple(tensor.shape)}, of sample 0 {tuple(first[key].shape)}: "
                    "samples of a batch must be equally long; pad them or use micro_batch_size=1"
                )
    return {key: torch.stack([sample[key] for sample in samples]) for key in first}
