"""Loaders whose order is replaced, on two data-parallel groups of one rank: what each rank reads in test_same_samples.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from lightning_sp import SequenceParallelError
from lightning_sp.data.loaders.coordinates import DataCoordinates
from lightning_sp.data.loaders.same_samples import same_samples
from tests.instruments.told import told


def read(sizes: list[int], batch_sizes: list[int], seeds: list[int], shuffle: list[bool]) -> Any:
    """Return the labels of an epoch that this rank reads, or what was refused; the arguments are of each rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = [{"labels": torch.tensor([i])} for i in range(sizes[rank])]
    loader = DataLoader(rows, batch_size=batch_sizes[rank], shuffle=shuffle[rank])
    coordinates = DataCoordinates(dp_rank=rank, dp_size=world, sequence_group=None, control_group=dist.group.WORLD)
    try:
        with told() as lines:
            found = same_samples(loader, coordinates, training=True, accumulation=1, seed=seeds[rank], by_hand=False)
    except SequenceParallelError as error:
        return str(error)
    labels = [label for batch in found for label in batch["labels"].flatten().tolist()]
    return labels, [line for line in lines if "other seeds" in line]
