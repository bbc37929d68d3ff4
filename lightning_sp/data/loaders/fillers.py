"""Fillers: samples that are repeated to fill up the last batch, with their targets ignored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_sp.data.batch.sharded_batch import ShardedBatch
from lightning_sp.errors import SequenceParallelError
from lightning_sp.labels import IGNORE_INDEX

TARGETS = ("shift_labels", "labels", "targets")
LOSS_MASKS = ("loss_mask", "target_mask", "loss_weights")


def known_targets(batch: Any) -> list[str]:
    """Return the entries of a batch that say what a sample counts for: its targets, and masks of its loss.

    Raises:
        SequenceParallelError: no entry is known to hold targets.
    """
    known = [n for n in (*TARGETS, *LOSS_MASKS) if isinstance(batch, Mapping) and isinstance(batch.get(n), Tensor)]
    if not known:
        held = list(batch) if isinstance(batch, Mapping) else type(batch).__name__
        raise SequenceParallelError(
            f"the samples do not divide evenly over the data-parallel ranks, and the batch ({held}) has no {', '.join(TARGETS)} to ignore in "
            "what keeps the others company in the last batch: use drop_last=True in training, or name the targets so"
        )
    return known


def mask_targets(batch: Any) -> Any:
    """Return the batch with all targets ignored and all masks of the loss zero.

    Raises:
        SequenceParallelError: no entry of the batch is known to hold targets.
    """
    masked = (
        ShardedBatch(batch) if isinstance(batch, ShardedBatch) else dict(batch) if isinstance(batch, Mapping) else batch
    )
    for name in known_targets(batch):
        masked[name] = torch.full_like(batch[name], IGNORE_INDEX if name in TARGETS else 0)
    return masked


class MarkedSample(tuple[Any, bool]):
    """A sample and whether it is a filler."""


class MarkedDataset(Dataset[MarkedSample]):
    """Give sample i for index i, and the same, marked as a filler, for ``~i``."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        """Count the real samples."""
        return len(self.dataset)

    def __getitem__(self, index: int) -> MarkedSample:
        """Return a sample and its mark."""
        return MarkedSample((self.dataset[index if index >= 0 else ~index], index < 0))


class MaskFillers:
    """A collate function that ignores the targets of a batch of fillers."""

    def __init__(self, collate: Callable[[list[Any]], Any], fillers_come: bool) -> None:
        self.collate, self.fillers_come = collate, fillers_come

    def __call__(self, items: list[MarkedSample]) -> Any:
        """Collate the samples."""
        batch = self.collate([sample for sample, _ in items])
        if self.fillers_come:
            known_targets(batch)  # refused with the first batch, and not when an epoch has been trained
        # A rank gets fillers alone, or none.
        return mask_targets(batch) if items[0][1] else batch
