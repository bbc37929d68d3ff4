"""Loaders of a user's own order on several data-parallel groups of one rank: what each rank reads in test_deal.py."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler

from lightning_sp import SequenceParallelError
from lightning_sp.data.batch.filler_marks import is_filler_batch
from lightning_sp.data.loaders.coordinates import DataCoordinates
from lightning_sp.data.loaders.same_samples import same_samples

SAMPLES = 10


class Stream(IterableDataset):
    """Numbers, whole or a group's share of them, until one is bad."""

    def __init__(self, share: slice = slice(None), bad: int = -1) -> None:
        self.share, self.bad = share, bad

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for i in range(SAMPLES)[self.share]:
            if i == self.bad:
                raise ValueError("a bad sample")
            yield {"labels": torch.tensor([i])}


class Shuffled(Stream):
    """In an order that the process' own random numbers make, without a seed."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        yield from ({"labels": torch.tensor([i])} for i in torch.randperm(SAMPLES).tolist())


def build(how: str) -> Any:
    rank = dist.get_rank()
    rows = [{"labels": torch.tensor([i])} for i in range(SAMPLES)]
    if how.startswith("weighted"):
        torch.manual_seed(rank)  # unseeded runs differ on the ranks
        generator = torch.Generator().manual_seed(rank) if how == "weighted, seeded by rank" else None
        sampler = WeightedRandomSampler([1.0] * SAMPLES, SAMPLES, generator=generator)
        workers = 2 if how == "weighted, workers" else 0
        return DataLoader(rows, batch_size=2, sampler=sampler, num_workers=workers)
    if how == "list":
        return [{"labels": torch.tensor([[i]])} for i in range(SAMPLES // 2)]
    if how == "shuffled":
        torch.manual_seed(rank)
        return DataLoader(Shuffled(), batch_size=2)
    share = slice(rank, None, dist.get_world_size()) if how == "split stream" else slice(None)
    return DataLoader(Stream(share, bad=0 if how == "bad stream" and rank == 1 else -1), batch_size=2)


def read(how: str, epochs: int = 2) -> dict[str, Any]:
    """Return the labels of each batch in each epoch, and the length that the trainer is told."""
    rank, size = dist.get_rank(), dist.get_world_size()
    coordinates = DataCoordinates(dp_rank=rank, dp_size=size, sequence_group=None, control_group=dist.group.WORLD)
    try:
        loader = same_samples(build(how), coordinates, training=True, accumulation=1, seed=0, by_hand=False)
        found = []
        for epoch in range(epochs):
            if dealt := loader.dealt:
                dealt.set_epoch(epoch)
            found.append(["filler" if is_filler_batch(each) else each["labels"].flatten().tolist() for each in loader])
        return {"batches": found, "length": len(loader) if "stream" not in how else None}
    except SequenceParallelError as error:
        return {"error": str(error)}


def read_in_one_sequence(how: str) -> dict[str, Any]:
    """Return the labels of one epoch that ranks of one sequence read, and what was said of the split."""
    coordinates = DataCoordinates(dp_rank=0, dp_size=1, sequence_group=dist.group.WORLD, control_group=dist.group.WORLD)
    loader = build(how)
    state = torch.get_rng_state() if dist.get_rank() else None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        read = same_samples(loader, coordinates, training=True, accumulation=1, seed=0, by_hand=False)
    assert state is None or torch.equal(state, torch.get_rng_state()), "a peer's random numbers are its own"
    labels = [label for batch in read for label in batch["labels"].flatten().tolist()]
    return {"labels": labels, "said": [str(each.message) for each in caught if "not trained on" in str(each.message)]}
