"""Users' own loaders: the same samples for all ranks of a sequence, different ones for each data-parallel rank.

Where a loader is a plain `DataLoader` over a map-style dataset, its sampler is replaced by the orders of `order`. Where it cannot be
(iterable or streaming datasets, own samplers, own loader classes), one rank of each sequence's group reads, and sends every batch to its
peers: they cannot differ then, whatever the loader's seeds and workers do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from lightning_sp import comm
from lightning_sp.data.batch import ShardedBatch, is_sharded
from lightning_sp.data.lazy_loader import LazyDataLoader
from lightning_sp.data.order import (
    BatchSplit,
    EvaluationBatchSampler,
    GlobalBatchSampler,
    Last,
    SequentialGlobalBatchSampler,
)
from lightning_sp.errors import SequenceParallelError
from lightning_sp.labels import IGNORE_INDEX

TARGETS = ("shift_labels", "labels", "targets")
LOSS_MASKS = ("loss_mask", "target_mask", "loss_weights")


@dataclass(frozen=True)
class DataCoordinates:
    """Where this rank stands, for its loaders.

    Args:
        dp_rank: data-parallel rank.
        dp_size: data-parallel size.
        sequence_group: ranks that share one sequence, on a backend for host objects; None for one rank.
        control_group: the world, likewise.
    """

    dp_rank: int
    dp_size: int
    sequence_group: ProcessGroup | None
    control_group: ProcessGroup | None


def is_ours(loader: Any) -> bool:
    """Return whether a loader already follows our orders."""
    ours = (GlobalBatchSampler, EvaluationBatchSampler)
    return isinstance(loader, BroadcastLoader) or any(
        isinstance(s, ours) for s in (_inner_sampler(loader), getattr(loader, "sampler", None))
    )


def can_replace_sampler(loader: Any) -> bool:
    """Return whether a loader's sampler says no more than its order: sequential or shuffled, in plain batches."""
    if type(loader) is not DataLoader or isinstance(loader.dataset, IterableDataset):
        return False
    batches = _innermost(loader.batch_sampler)
    if type(batches) is not BatchSampler:
        return False
    sampler = batches.sampler
    return type(sampler) in (SequentialSampler, DistributedSampler) or (
        type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(loader.dataset)  # type: ignore[arg-type]
    )


def same_samples(
    loader: Any, place: DataCoordinates, *, training: bool, accumulation: int, seed: int, by_hand: bool
) -> Any:
    """Return a loader that gives all ranks of a sequence the same samples: its order replaced, or one rank of each sequence reading.

    Args:
        loader: the user's.
        place: this rank's.
        training: whether its order is one of training.
        accumulation: micro-batches of an optimizer step.
        seed: of the shuffle.
        by_hand: each rank's loader gives its own part of every batch.
    """
    if is_ours(loader):
        return loader
    if can_replace_sampler(loader):
        return replace_sampler(loader, place, training=training, accumulation=accumulation, seed=seed)
    world = comm.size_of(place.control_group or comm.world())
    if world == 1:
        return BroadcastLoader(loader, place) if training else loader
    kind = type(loader).__name__
    if by_hand:
        rank_zero_info(
            f"sequence_parallel: the order of {kind} cannot be replaced, and with shard_batch=False every rank reads its own part"
        )
        return BroadcastLoader(loader, DataCoordinates(place.dp_rank, place.dp_size, None, place.control_group))
    rank_zero_info(
        f"sequence_parallel: the order of {kind} cannot be replaced, so one rank of each sequence's group reads it and sends the batches to "
        f"its peers; split the data over {place.dp_size} data-parallel groups by trainer.strategy.data_parallel_rank"
    )
    return BroadcastLoader(loader, place)


def replace_sampler(
    loader: DataLoader[Any], place: DataCoordinates, *, training: bool, accumulation: int, seed: int
) -> DataLoader[Any]:
    """Return the same loader with the order of `order`.

    Args:
        loader: one for which `can_replace_sampler` holds.
        place: this rank's.
        training: a shuffled or sequential global order, else the one-process evaluation batches dealt out.
        accumulation: micro-batches of an optimizer step.
        seed: of the shuffle.
    """
    num_samples = len(loader.dataset)  # type: ignore[arg-type]
    batches: Any = _innermost(loader.batch_sampler)
    sampler: GlobalBatchSampler | EvaluationBatchSampler
    if training:
        split = BatchSplit(batches.batch_size, accumulation, place.dp_size)
        last: Last = "drop_micro" if batches.drop_last else "pad"
        shuffle = isinstance(batches.sampler, RandomSampler) or getattr(batches.sampler, "shuffle", False)
        if shuffle:
            sampler = GlobalBatchSampler(num_samples, split, place.dp_rank, seed=seed, shuffle=True, last=last)
        else:
            sampler = SequentialGlobalBatchSampler(num_samples, split, place.dp_rank, seed=seed, last=last)
    else:
        sampler = EvaluationBatchSampler(num_samples, batches.batch_size, place.dp_rank, place.dp_size)
    fillers_come = bool(sampler.num_fillers if training else sampler.num_filler_batches)  # type: ignore[union-attr]
    wrapper: Any = type(loader.batch_sampler)
    batch_sampler: Any = sampler if wrapper is BatchSampler else wrapper(sampler)
    return LazyDataLoader(
        _Marked(loader.dataset),
        batch_sampler=batch_sampler,
        collate_fn=_MaskFillers(loader.collate_fn, fillers_come),
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )


def training_sampler(loader: Any) -> GlobalBatchSampler | None:
    """Return the global order that a training loader follows, None where it has one of its own."""
    for sampler in (_inner_sampler(loader), getattr(loader, "sampler", None)):
        if isinstance(sampler, GlobalBatchSampler) and not isinstance(loader, BroadcastLoader):
            return sampler
    return None


def filler_batch(loader: Any, batch_idx: int) -> bool:
    """Return whether an evaluation batch of this rank only keeps the others company: all its samples belong to another."""
    if isinstance(loader, BroadcastLoader):
        return loader.fillers_from is not None and batch_idx >= loader.fillers_from
    for sampler in (_inner_sampler(loader), getattr(loader, "sampler", None)):
        if isinstance(sampler, EvaluationBatchSampler):
            return sampler.dp_rank + batch_idx * sampler.dp_size >= sampler.num_batches
    return False


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


class _Item(tuple[Any, bool]):
    """A sample and whether it is a filler."""


class _Marked(Dataset[_Item]):
    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> _Item:
        return _Item((self.dataset[index if index >= 0 else ~index], index < 0))


class _MaskFillers:
    def __init__(self, collate: Callable[[list[Any]], Any], fillers_come: bool) -> None:
        self.collate, self.fillers_come = collate, fillers_come

    def __call__(self, items: list[_Item]) -> Any:
        batch = self.collate([sample for sample, _ in items])
        if self.fillers_come:
            known_targets(batch)  # refused with the first batch, and not when an epoch has been trained
        # A rank gets fillers alone, or none.
        return mask_targets(batch) if items[0][1] else batch


class BroadcastLoader:
    """One rank of a sequence's group reads a loader and sends each batch to its peers, its end and its errors included.

    Without a group in its place every rank reads its own: batches that were sharded by hand.

    Data-parallel groups whose loaders end at different times go on together: those that have ended repeat their last batch without targets,
    until all have.

    Args:
        loader: the user's; iterated on the reading rank alone.
        place: this rank's.

    `skip` micro-batches of the next epoch are read and discarded: the position that a checkpoint stored.
    """

    def __init__(self, loader: Iterable[Any], place: DataCoordinates) -> None:
        self.loader, self.place = loader, place
        self.fillers_from: int | None = None
        self.skip = 0

    def __len__(self) -> int:
        """Return the length of the user's loader."""
        return len(self.loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        # Lightning turns epochs by `sampler`/`batch_sampler`, and asks loaders that keep a state for it.
        if name in ("loader", "place"):
            raise AttributeError(name)
        return getattr(self.loader, name)

    def state_dict(self) -> dict[str, Any]:
        """Say where the position is kept: as a count of micro-batches, by the strategy."""
        return {"position_kept_by": "lightning_sp"}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take nothing: the strategy has set `skip`."""

    def __iter__(self) -> Iterator[Any]:
        """Yield the reading rank's batches on every rank of the group."""
        self.fillers_from = None
        reader = comm.rank_in(self.place.sequence_group) == 0
        source = iter(self.loader) if reader else iter(())
        # Of the epoch that a checkpoint ended in; the next ones are read from their start.
        skip, self.skip = self.skip, 0
        count, last = 0, None
        while True:
            message = self._read(source) if reader else None
            if self.place.sequence_group is not None:
                message = comm.broadcast_object(message, self.place.sequence_group)
            assert message is not None
            kind, value = message
            told = (self.place.dp_rank, kind, value if kind == "error" else None)
            states = comm.gather_objects(told, self.place.control_group)
            if errors := [f"rank {rank}: {said}" for rank, (_, state, said) in enumerate(states) if state == "error"]:
                raise SequenceParallelError("the loader failed: " + "; ".join(errors))
            if all(state == "end" for _, state, _ in states):
                return
            if unequal := {dp_rank for dp_rank, state, _ in states if state == "end"} & {
                dp_rank for dp_rank, state, _ in states if state == "batch"
            }:
                raise SequenceParallelError(
                    f"the ranks of one sequence (data-parallel rank {sorted(unequal)}) read loaders of different lengths: after {count} batches "
                    "some have ended and others have not; with shard_batch=False each must give its part of the same batches"
                )
            if kind == "end":
                if last is None:
                    raise SequenceParallelError(
                        f"data-parallel rank {self.place.dp_rank} has no batch at all while others have: split the dataset so that each has one"
                    )
                self.fillers_from = count if self.fillers_from is None else self.fillers_from
                value = mask_targets(last)
            last = value
            count += 1
            if count > skip:
                yield value

    def _read(self, source: Iterator[Any]) -> tuple[str, Any]:
        try:
            batch = next(source)
            if self.place.sequence_group is not None and is_sharded(batch):
                return "error", (
                    f"{type(batch).__name__} holds one rank's part, and this loader is read by one rank of each sequence for all: let it give "
                    "whole batches, or set shard_batch=False, so that every rank reads its own"
                )
            return "batch", batch
        except StopIteration:
            return "end", None
        except Exception as error:  # sent to the peers, which would wait for ever
            return "error", f"{type(error).__name__}: {error}"


def _inner_sampler(loader: Any) -> Any:
    return _innermost(getattr(loader, "batch_sampler", None))


def _innermost(sampler: Any) -> Any:
    """Lightning wraps batch samplers in prediction, to know the indices."""
    return getattr(sampler, "_batch_sampler", None) or sampler
