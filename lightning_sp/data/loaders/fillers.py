"""Fillers: samples that are repeated where a rank would have none in the last batch, with their targets ignored.

Every rank must take part in the collectives of a micro-batch. A sampler gives the index of a filler as ``~i``: sample i keeps its shape and adds
nothing to a loss over valid tokens. A rank's batch holds fillers alone, or none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_sp.data.batch.sharded_batch import FillerBatch, ShardedBatch, ShardedFillerBatch
from lightning_sp.errors import SequenceParallelError
from lightning_sp.labels import IGNORE_INDEX

TARGETS = ("shift_labels", "labels", "targets")
LOSS_MASKS = ("loss_mask", "completion_mask", "target_mask", "loss_weights")


class MarkedSample(NamedTuple):
    """A sample, and whether it is a filler."""

    sample: Any
    is_filler: bool


class FillerDataset(Dataset[MarkedSample]):
    """Sample i of a dataset for index i, and the same, marked as a filler, for ``~i``."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        """Count the real samples."""
        return len(self.dataset)

    def __getitem__(self, index: int) -> MarkedSample:
        """Return a sample and its mark."""
        return MarkedSample(self.dataset[index if index >= 0 else ~index], index < 0)


class FillerCollate:
    """A collate function that ignores the targets of a batch of fillers.

    It works on the batch and not on samples: only there are a user's targets sure to have names.

    Args:
        collate: the user's: samples -> a batch.
        fillers_come: this run has fillers. A batch without known targets is then refused at once, not at an epoch's end.
    """

    def __init__(self, collate: Callable[[list[Any]], Any], *, fillers_come: bool) -> None:
        self.collate, self.fillers_come = collate, fillers_come

    def __call__(self, samples: list[MarkedSample]) -> Any:
        """Collate samples that `FillerDataset` has marked."""
        batch = self.collate([marked.sample for marked in samples])
        if self.fillers_come:
            known_targets(batch)
        return ignore_targets(batch) if samples[0].is_filler else batch


def known_targets(batch: Any) -> list[str]:
    """Return the entries of a batch that say what a sample counts for: its targets, and masks of its loss.

    Raises:
        SequenceParallelError: no entry is known to hold targets.
    """
    found = [n for n in (*TARGETS, *LOSS_MASKS) if isinstance(batch, Mapping) and isinstance(batch.get(n), Tensor)]
    # No number means "ignored" to a loss of numbers.
    known = [n for n in found if n in LOSS_MASKS or not batch[n].is_floating_point()]
    if not known:
        entries = list(batch) if isinstance(batch, Mapping) else type(batch).__name__
        raise SequenceParallelError(
            f"the samples do not divide evenly over the data-parallel ranks, and the batch ({entries}) has no {', '.join(TARGETS)} of whole "
            "numbers to ignore in what fills up the last batch: use drop_last=True in training, or name the targets so"
        )
    return known


def ignore_targets(batch: Any) -> Any:
    """Return the batch with all targets ignored and all masks of the loss zero.

    Raises:
        SequenceParallelError: no entry of the batch is known to hold targets.
    """
    known = known_targets(batch)
    filler = ShardedFillerBatch(batch) if isinstance(batch, ShardedBatch) else FillerBatch(batch)
    for name in known:
        filler[name] = torch.full_like(batch[name], IGNORE_INDEX if name in TARGETS else 0)
    return filler
