"""FSDP2's collectives in a trial, each of which the ranks meet before: one that has failed by itself holds up none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from lightning_sp import comm
from lightning_sp.parallelize.fsdp.parameter_groups import fsdp_modules, parameter_groups


@contextmanager
def failing_together(root: nn.Module) -> Iterator[None]:
    """Run a forward and a backward in which no rank waits in a collective for one that has failed. Every rank must call it; it ends together.

    Args:
        root: the sharded module.

    Communicates: as `comm.failing_together`.

    Raises:
        PeerError: another rank has failed.
    """
    groups = parameter_groups(fsdp_modules(root))
    # FSDP2's own of a backend have no public name, and its setter takes one that is custom.
    before = [(group._all_gather_comm, group._reduce_scatter_comm) for group in groups]
    for group, (gather, scatter) in zip(groups, before, strict=True):
        group._all_gather_comm = comm.CheckedAllGather(gather)
        group._reduce_scatter_comm = comm.CheckedReduceScatter(scatter)
    try:
        with comm.failing_together():
            yield
    finally:
        for group, (gather, scatter) in zip(groups, before, strict=True):
            group._all_gather_comm, group._reduce_scatter_comm = gather, scatter
