"""Samples -> a batch, and what a filler index means: the sample with all of its targets ignored."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.utils.data import Dataset

from lightning_sp.errors import SequenceParallelError
from lightning_sp.labels import IGNORE_INDEX
from lightning_sp.text.windows import Sample


class FillerAware(Dataset[Sample]):
    """Give sample i for i, and for ``~i`` (a filler of `order`) the same with every target ignored.

    A filler keeps shapes and collectives as they are and contributes exactly nothing to a loss over valid tokens.

    Args:
        dataset: Map style.
        target_keys: The entries that hold targets. All must be there.
    """

    def __init__(self, dataset: Dataset[Sample], target_keys: Sequence[str] = ("shift_labels", "labels")) -> None:
        self.dataset = dataset
        self.target_keys = tuple(target_keys)

    def __len__(self) -> int:
        """Return the number of real samples."""
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Sample:
        """Return a sample, its targets ignored where the index is a filler's."""
        if index >= 0:
            return self.dataset[index]
        sample = dict(self.dataset[~index])
        missing = [key for key in self.target_keys if key not in sample]
        if missing:
            raise SequenceParallelError(
                f"a filler's targets must be ignored, but the sample has no {missing}: it has {sorted(sample)}; "
                "name the entries that hold targets in target_keys"
            )
        return sample | {key: torch.full_like(sample[key], IGNORE_INDEX) for key in self.target_keys}


class Batches(Dataset[Sample]):
    """The whole batch for a list of indices: for loaders whose sampler yields lists (``batch_size=None``)."""

    def __init__(self, dataset: Dataset[Sample]) -> None:
        self.dataset = dataset

    def __getitem__(self, indices: list[int]) -> Sample:
        """Return the stacked samples."""
        return stack([self.dataset[index] for index in indices])


def stack(samples: Sequence[Sample]) -> Sample:
    """Stack samples of equal keys and lengths along a new first dim.

    Raises:
        SequenceParallelError: With the keys or shapes that differ.
    """
    if not samples:
        raise SequenceParallelError("a batch needs at least one sample, got none")
    first = samples[0]
    for i, sample in enumerate(samples[1:], start=1):
        if sample.keys() != first.keys():
            raise SequenceParallelError(f"sample {i} of a batch has {sorted(sample)}, sample 0 has {sorted(first)}")
        for key, tensor in sample.items():
            if tensor.shape != first[key].shape:
                raise SequenceParallelError(
                    f"{key} of sample {i} has shape {tuple(tensor.shape)}, of sample 0 {tuple(first[key].shape)}: "
                    "samples of a batch must be equally long; pad them or use micro_batch_size=1"
                )
    return {key: torch.stack([sample[key] for sample in samples]) for key in first}
