"""A user's DataLoader with one of our samplers in place of its own."""

from __future__ import annotations

from typing import Any, cast

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from lightning_sp import comm
from lightning_sp.data.loaders.broadcast_loader import BroadcastLoader
from lightning_sp.data.loaders.coordinates import DataCoordinates
from lightning_sp.data.loaders.fillers import FillerCollate, FillerDataset
from lightning_sp.data.loaders.lazy_loader import LazyDataLoader
from lightning_sp.data.samplers.batch_split import BatchSplit, Last
from lightning_sp.data.samplers.evaluation_sampler import EvaluationBatchSampler
from lightning_sp.data.samplers.training_sampler import GlobalBatchSampler, SequentialGlobalBatchSampler
from lightning_sp.errors import SequenceParallelError


def has_our_sampler(loader: Any) -> bool:
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
    sampler, num_samples = batches.sampler, len(loader.dataset)  # type: ignore[arg-type]
    if type(sampler) is RandomSampler:
        return not sampler.replacement and sampler.num_samples == num_samples
    # One of `range(100)` reads the first hundred.
    source = getattr(sampler, "data_source" if type(sampler) is SequentialSampler else "dataset", None)
    known = type(sampler) in (SequentialSampler, DistributedSampler) and source is not None
    return known and len(source) == num_samples  # type: ignore[arg-type]


def replace_sampler(
    loader: DataLoader[Any], coordinates: DataCoordinates, *, training: bool, accumulation: int, seed: int
) -> DataLoader[Any]:
    """Return the same loader with one of our samplers.

    Args:
        loader: one for which `can_replace_sampler` holds.
        coordinates: this rank's.
        training: a shuffled or sequential global order, else the one-process evaluation batches dealt out.
        accumulation: micro-batches of an optimizer step.
        seed: of the shuffle.
    """
    num_samples = len(loader.dataset)  # type: ignore[arg-type]
    batches: Any = _innermost(loader.batch_sampler)
    shuffle = _shuffles(batches)
    sampler: GlobalBatchSampler | EvaluationBatchSampler
    if training:
        split = BatchSplit(batches.batch_size, accumulation, coordinates.dp_size)
        last: Last = "drop_micro" if batches.drop_last else "pad"
        if shuffle:
            sampler = GlobalBatchSampler(num_samples, split, coordinates.dp_rank, seed=seed, shuffle=True, last=last)
        else:
            sampler = SequentialGlobalBatchSampler(num_samples, split, coordinates.dp_rank, seed=seed, last=last)
    else:
        place = coordinates.dp_rank, coordinates.dp_size
        sampler = EvaluationBatchSampler(num_samples, batches.batch_size, *place, drop_last=batches.drop_last)
    fillers_come = isinstance(sampler, GlobalBatchSampler) and sampler.num_fillers > 0
    wrapper: Any = type(loader.batch_sampler)
    batch_sampler: Any = sampler if wrapper is BatchSampler else wrapper(sampler)
    found = LazyDataLoader(
        FillerDataset(loader.dataset),
        batch_sampler=batch_sampler,
        collate_fn=FillerCollate(loader.collate_fn, trains=training, fillers_come=fillers_come),
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )
    if comm.size_of(coordinates.sequence_group) > 1:
        found.seeds = seed, coordinates.dp_rank, int(training)
    # What users read of their loader, and of its batch sampler, through the Trainer; torch forbids to set the first two of a loader.
    for name, value in {"batch_size": batches.batch_size, "drop_last": batches.drop_last}.items():
        object.__setattr__(found, name, value)
        setattr(sampler, name, value)
    for name in vars(loader).keys() - vars(found).keys():
        if not name.startswith("_"):  # Lightning's own
            setattr(found, name, vars(loader)[name])
    found.follow_users = _Changes(found, loader).follow
    return found


class _Changes:
    """What a user changes, between epochs, of a loader that another stands for; a class because it remembers the last.

    Args:
        found: the loader in its place.
        users: the user's own, of which a module or a data module may keep hold.
    """

    def __init__(self, found: LazyDataLoader, users: DataLoader[Any]) -> None:
        self._found, self._users = found, users
        self._collate, self._marks = users.collate_fn, cast(FillerCollate, found.collate_fn)

    def follow(self) -> None:
        """Collate as the user's loader does by now.

        Raises:
            SequenceParallelError: its batches have another size than when their order was made.
        """
        found, users, marks = self._found, self._users, self._marks
        for batches in (_innermost(users.batch_sampler), found.batch_sampler):
            size, last = (getattr(batches, name, getattr(found, name)) for name in ("batch_size", "drop_last"))
            if (size, last) != (found.batch_size, found.drop_last):
                raise SequenceParallelError(
                    f"the loader's batch sampler has batch_size={size}, drop_last={last}, and had batch_size={found.batch_size}, "
                    f"drop_last={found.drop_last} when the order of its samples was made, which a resume and the accumulation go by; give "
                    "train_dataloader the size of each epoch, with Trainer(reload_dataloaders_every_n_epochs=1), or keep it for a run"
                )
        if users.collate_fn is not self._collate:
            self._collate = found.collate_fn = users.collate_fn
        if not isinstance(found.collate_fn, FillerCollate):  # set by the user, here or through the Trainer
            found.collate_fn = FillerCollate(found.collate_fn, trains=marks.trains, fillers_come=marks.fillers_come)


def described_order(loader: DataLoader[Any]) -> str:
    """Return in words what the order of a loader depends on, where `can_replace_sampler` holds: the same on all ranks."""
    batches: Any = _innermost(loader.batch_sampler)
    order = "shuffled" if _shuffles(batches) else "in their order"
    last = ", without a last smaller one" if batches.drop_last else ""
    return f"{len(loader.dataset):,} samples {order} in batches of {batches.batch_size}{last}"  # type: ignore[arg-type]


def _shuffles(batches: Any) -> bool:
    return isinstance(batches.sampler, RandomSampler) or bool(getattr(batches.sampler, "shuffle", False))


def training_sampler(loader: Any) -> GlobalBatchSampler | None:
    """Return the global order that a training loader follows, None where it has one of its own."""
    for sampler in (_inner_sampler(loader), getattr(loader, "sampler", None)):
        if isinstance(sampler, GlobalBatchSampler) and not isinstance(loader, BroadcastLoader):
            return sampler
    return None


def is_filler_batch(loader: Any, batch_idx: int) -> bool:
    """Return whether all samples of an evaluation batch are fillers: they belong to another rank."""
    if isinstance(loader, BroadcastLoader):
        return loader.fillers_from is not None and batch_idx >= loader.fillers_from
    for sampler in (_inner_sampler(loader), getattr(loader, "sampler", None)):
        if isinstance(sampler, EvaluationBatchSampler):
            return sampler.dp_rank + batch_idx * sampler.dp_size >= sampler.num_batches
    return False


def num_groups(loader: Any) -> int:
    """Return over how many data-parallel groups the batches of an evaluation loader are dealt."""
    if isinstance(loader, BroadcastLoader):
        return loader.coordinates.dp_size
    samplers = (_inner_sampler(loader), getattr(loader, "sampler", None))
    return max((each.dp_size for each in samplers if isinstance(each, EvaluationBatchSampler)), default=1)


def _inner_sampler(loader: Any) -> Any:
    return _innermost(getattr(loader, "batch_sampler", None))


def _innermost(sampler: Any) -> Any:
    """Lightning wraps batch samplers in prediction, to know the indices."""
    return getattr(sampler, "_batch_sampler", None) or sampler
