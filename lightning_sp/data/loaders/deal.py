"""Batches of a user's own order, dealt over the data-parallel groups: one device's batch is a round of `dp_size` of the loader's.

Of each round a group keeps the batch at its own rank. Samplers of a map-style dataset are dealt by index, so that a sample is loaded once.
What can only be read (iterable datasets, loaders of other classes) is dealt if all groups read the same first batch, and then read whole by
each; otherwise the user has split it, and it stays as it is.
"""

from __future__ import annotations

import copy
import random
import zlib
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from lightning_sp.data.loaders.coordinates import DataCoordinates
from lightning_sp.errors import SequenceParallelError

_END = object()
States = tuple[Any, Any, torch.Tensor]


class RandomStream:
    """The random numbers of torch, Python and numpy that are drawn in its context: apart from the process' own.

    Args:
        start: a seed of all three, or `random_states()` of another process.
    """

    def __init__(self, start: int | States) -> None:
        if isinstance(start, int):
            torch_state = torch.Generator().manual_seed(start).get_state()
            start = random.Random(start).getstate(), np.random.RandomState(start).get_state(), torch_state
        self._inside: States = start
        self._outside = random_states()

    def __enter__(self) -> None:
        self._outside = random_states()
        _set_states(self._inside)

    def __exit__(self, *_: object) -> None:
        self._inside = random_states()
        _set_states(self._outside)


class DealtIndices:
    """The part of a sampler's batches that belongs to one data-parallel group.

    What the sampler draws without a generator of its own is a function of the seed and the epoch: equal on all groups, and in a resume.

    Args:
        batches: the user's batch sampler, or its sampler where samples are whole batches.
        coordinates: this rank's.
        seed: of what the sampler draws from the global random streams.
    """

    def __init__(self, batches: Any, coordinates: DataCoordinates, seed: int) -> None:
        self.batches, self.coordinates, self.seed = batches, coordinates, seed
        self.epoch = 0
        # A number for each round that was drawn and not yet read: workers fetch ahead.
        self.rounds: deque[int] = deque()

    def __getattr__(self, name: str) -> Any:
        if name == "batches":
            raise AttributeError(name)
        return getattr(self.batches, name)

    @property
    def sampler(self) -> DealtIndices:
        """Return itself: of a loader's batch sampler Lightning turns the epochs of its ``sampler`` alone."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Turn to an epoch, and the user's sampler too where it has epochs."""
        self.epoch = epoch
        for turned in (self.batches, getattr(self.batches, "sampler", None)):
            if callable(turn := getattr(turned, "set_epoch", None)):
                turn(epoch)

    def __len__(self) -> int:
        """Count the rounds; the last one may leave some groups without a batch."""
        return int(-(-len(self.batches) // self.coordinates.dp_size))

    def __iter__(self) -> Iterator[Any]:
        """Yield the indices of this group's batches."""
        self.rounds.clear()
        stream = RandomStream(self.seed + self.epoch)
        with stream:
            drawn = iter(self.batches)
        while True:
            with stream:
                # Not by islice, which begins anew with an iterator that does: Lightning's, of predictions.
                read = [next(drawn, _END) for _ in range(self.coordinates.dp_size)]
            whole = [each for each in read if each is not _END]
            if len(whole) <= self.coordinates.dp_rank:
                return
            self.rounds.append(zlib.crc32(repr(whole).encode()))
            yield whole[self.coordinates.dp_rank]


def deal_indices(loader: Any, coordinates: DataCoordinates, seed: int) -> tuple[Any, DealtIndices | None]:
    """Return a loader whose sampler is dealt over the data-parallel groups, and that sampler; the loader itself where there is no index to deal.

    Args:
        loader: the user's; it is not changed.
        coordinates: this rank's.
        seed: of what the sampler draws from the global random streams.

    Raises:
        SequenceParallelError: its samples are split already, in another way than over the data-parallel groups.
    """
    if not isinstance(loader, DataLoader) or coordinates.dp_size == 1:
        return loader, None
    samplers = (loader.sampler, getattr(loader.batch_sampler, "sampler", None))
    splits = [sampler for sampler in samplers if isinstance(sampler, DistributedSampler)]
    if isinstance(loader.dataset, IterableDataset) or splits:
        _check_split(loader.dataset, splits, coordinates)
        return loader, None
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    dealt = DealtIndices(getattr(loader, name), coordinates, seed)
    # DataLoader forbids to set them, and a loader of another class cannot be made anew: its arguments are not known.
    loader = copy.copy(loader)
    object.__setattr__(loader, name, dealt)
    return loader, dealt


def _check_split(dataset: Any, splits: list[DistributedSampler[Any]], coordinates: DataCoordinates) -> None:
    # Of Hugging Face's `split_dataset_by_node`.
    found = getattr(dataset, "_distributed", None)
    given = [(s.num_replicas, s.rank) for s in splits] + ([] if found is None else [(found.world_size, found.rank)])
    wanted = (coordinates.dp_size, coordinates.dp_rank)
    if wrong := [each for each in given if each != wanted]:
        raise SequenceParallelError(
            f"the samples are split into {wrong[0][0]} parts, of which this rank reads part {wrong[0][1]}, but the ranks of one sequence read "
            f"the same samples: split them into data_parallel_size={wanted[0]} parts, and read part trainer.strategy.data_parallel_rank, here "
            f"{wanted[1]}"
        )


def random_states() -> States:
    """Return the states of the process' random streams: Python's, numpy's and torch's."""
    return random.getstate(), np.random.get_state(), torch.random.get_rng_state()


def _set_states(states: States) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.random.set_rng_state(states[2])
