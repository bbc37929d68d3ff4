"""A crop as one device gets it, and this rank's part of it as a sharded step gets it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from lightning_sp.context.dropout import DropoutSource
from lightning_sp.context.sequence import SequenceInfo
from lightning_sp.data.batch.shard_options import ShardOptions
from lightning_sp.data.batch.sharding import shard_batch
from lightning_sp.layout import SequenceLayout
from lightning_sp.mesh import SequenceMesh
from lightning_sp.parallelize import run_with_whole_parameters
from lightning_sp.preflight.crops.crop import Crop
from lightning_sp.preflight.crops.untouched_batch import untouched_batch


@dataclass(frozen=True)
class Run:
    """A batch for the user's step, and what was whole before it was sharded."""

    batch: Any
    info: SequenceInfo


def both_runs(
    crop: Crop, own: Crop, options: ShardOptions, mesh: SequenceMesh, device: torch.device
) -> tuple[Run, Run]:
    """Return the whole crop as the loader gives it to one device, and this rank's part of its group's crop."""
    return untouched_run(crop.batch, options, device), part_run(own, options, mesh, mesh.sequence_rank, device)


def part_run(crop: Crop, options: ShardOptions, mesh: SequenceMesh, rank: int, device: torch.device) -> Run:
    """Return a rank's part of a crop, by its number in the sequence's group."""
    # A crop is too short for balance="auto" to leave zigzag: what the run may do is tried.
    tried = options if options.balance == "zigzag" else replace(options, balance="documents")
    local, info = shard_batch(crop.batch, mesh.layout, rank, tried)
    info = replace(
        info,
        dropout=DropoutSource(0, 0, torch.arange(crop.rows), off=True),
        seed=mesh.data_parallel_rank,
        uneven_entries=crop.uneven_entries,
    ).to(device)
    return Run(local, info)


def untouched_run(batch: Any, options: ShardOptions, device: torch.device) -> Run:
    """Return a whole batch as the loader gives it to one device."""
    held, info = shard_batch(batch, SequenceLayout(), 0, replace(options, apart=False))
    info = info if info.documents_declared else replace(info, boundaries=None)
    return Run(untouched_batch(batch, held, device), info.to(device))


def run_forward(module: nn.Module, run: Callable[[], Any]) -> None:
    """Run a step of which nothing but its errors is asked: with a graph in training, for it may ask for gradients by itself."""
    with torch.set_grad_enabled(module.training):
        run_with_whole_parameters(run)
