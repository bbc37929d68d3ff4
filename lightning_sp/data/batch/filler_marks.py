"""The mark of a training batch of fillers, samples that are repeated to keep other ranks' collectives company: its type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_sp.data.batch.sharded_batch import ShardedBatch
from lightning_sp.errors import SequenceParallelError
from lightning_sp.labels import IGNORE_INDEX, can_be_ignored

TARGETS = ("shift_labels", "labels", "targets")
LOSS_MASKS = ("loss_mask", "completion_mask", "target_mask", "loss_weights")


class FillerBatch(dict[str, Any]):
    """A batch of fillers alone. The type is the mark: none of its rows counts. Entries are attributes too, as a `BatchEncoding`'s are."""

    def __getattr__(self, name: str) -> Any:
        """Return an entry."""
        if name in self:
            return self[name]
        raise AttributeError(name)


class FillerList(list[Any]):
    """The same of a list."""


class FillerTuple(tuple[Any, ...]):
    """The same of a tuple."""


class ShardedFillerBatch(FillerBatch, ShardedBatch):
    """Both."""


def marked(batch: Any) -> Any:
    """Return a batch of fillers with their mark, its type.

    Raises:
        SequenceParallelError: it is of a class of its own, which has no other one with a mark.
    """
    if is_filler_batch(batch):
        return batch
    if isinstance(batch, Mapping):
        return ShardedFillerBatch(batch) if isinstance(batch, ShardedBatch) else FillerBatch(batch)
    if type(batch) in (list, tuple):
        return FillerList(batch) if type(batch) is list else FillerTuple(batch)
    raise SequenceParallelError(
        f"the samples do not divide evenly over the data-parallel ranks, and what fills up the last batch can have no mark as a "
        f"{type(batch).__name__}: use drop_last=True in training, or let the collate function return a dict, a list or a tuple"
    )


def ignore_beside_others(batch: Any) -> bool:
    """Ignore, in place, the targets of fillers that stand in one batch with samples of other loaders; return whether there are some.

    Raises:
        SequenceParallelError: they have no entry that is known to hold targets.
    """
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else ()
    found = [each for each in parts if is_filler_batch(each)]
    for each in found:
        _ignore_targets(each)
    return bool(found)


def is_filler_batch(batch: Any) -> bool:
    """Return whether a batch has the mark of fillers."""
    return isinstance(batch, (FillerBatch, FillerList, FillerTuple))


def without_mark(batch: Any) -> Any:
    """Return a list or tuple of fillers as its user knows it."""
    return list(batch) if isinstance(batch, FillerList) else tuple(batch) if isinstance(batch, FillerTuple) else batch


def _ignore_targets(batch: Any) -> None:
    found = [n for n in (*TARGETS, *LOSS_MASKS) if isinstance(batch, Mapping) and isinstance(batch.get(n), Tensor)]
    # No number means "ignored" to a loss of numbers.
    known = [n for n in found if n in LOSS_MASKS or not batch[n].is_floating_point()]
    if not known:
        entries = list(batch) if isinstance(batch, Mapping) else type(batch).__name__
        raise SequenceParallelError(
            f"the samples of one of several loaders do not divide evenly over the data-parallel ranks, and its batch ({entries}) has no "
            f"{', '.join(TARGETS)} of whole numbers to ignore in what fills up the last one: use drop_last=True, or name the targets so"
        )
    for name in known:
        ignored = name in TARGETS
        batch[name] = torch.full_like(can_be_ignored(batch[name]) if ignored else batch[name], IGNORE_INDEX * ignored)
