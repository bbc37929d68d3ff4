"""Sharding a batch on all ranks or on none: what is wrong on one is raised on every one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from torch.distributed import ProcessGroup

from lightning_sp import comm
from lightning_sp.context.sequence import SequenceInfo
from lightning_sp.data.batch.contents.media import entries_digest
from lightning_sp.data.batch.digest import digest
from lightning_sp.data.batch.filler_marks import ignore_beside_others, is_filler_batch, without_mark
from lightning_sp.data.batch.hand_sharded import hand_sharded_info
from lightning_sp.data.batch.shard_options import ShardOptions
from lightning_sp.data.batch.sharded_batch import is_sharded
from lightning_sp.data.batch.sharding import shard_batch
from lightning_sp.errors import SequenceParallelError
from lightning_sp.mesh import SequenceMesh


def collective_shard(
    batch: Any,
    mesh: SequenceMesh,
    options: ShardOptions,
    group: ProcessGroup | None,
    *,
    by_hand: bool,
    ends: bool = False,
    is_changed: bool = False,
    is_filler: bool = False,
    is_new: Callable[[SequenceInfo], bool] = lambda _: False,
    loop: Mapping[str, Any] = MappingProxyType({}),
    most_tokens: int = sys.maxsize,
    written: comm.Written = comm.NOTHING_WRITTEN,
) -> tuple[Any, SequenceInfo, comm.SameBatch]:
    """Return this rank's part of a batch, what was whole, and what ranks have told each other: `comm.check_same_batch`. Every rank must call it.

    Args:
        batch: whole, or this rank's part if it carries the mark of one.
        mesh: this rank's coordinates, and the layout.
        options: which tensors carry the sequence.
        group: the world, on a backend for host tensors.
        by_hand: the batch is this rank's part already, mark or none.
        ends: this rank was told to end the run.
        is_changed: numbers by which the step may do other things have changed on this rank.
        is_filler: the loader knows that none of the rows counts; a batch that still carries the mark of fillers says so itself.
        is_new: tells of a batch on which the step may do other things, too.
        loop: plain values by name, by which the loop decides what follows this batch.
        most_tokens: of a rank, above which the batch is longer than those before.
        written: what this rank has written to outside of its steps.

    Raises:
        SequenceParallelError: on all ranks together, where one cannot shard its batch or ranks of one sequence hold different ones.
    """
    is_filler, batch = is_filler or is_filler_batch(batch), without_mark(batch)
    local, info, beside, fault = _own_part(batch, mesh, options, by_hand=by_hand)
    compared = local is not batch or _is_whole_of_all(batch, info, mesh, by_hand=by_hand)
    flags = comm.BatchFlags(ends=ends, changed=is_changed, fillers=is_filler)
    if info is not None:
        longer, changed = info.local_tokens > most_tokens, is_changed or is_new(info)
        flags = flags._replace(longer=longer, padded=info.pads, changed=changed)
    try:
        agreed = comm.check_same_batch(
            _words(fault),
            digest=digest(batch) if fault is None and compared else 0,
            data_parallel_rank=mesh.data_parallel_rank,
            num_ring_passes=mesh.num_ring_passes,
            num_groups=mesh.data_parallel_size,
            entries=entries_digest(batch),
            is_whole=info is not None and info.is_whole,
            rows=_rows(info, is_filler=is_filler, beside=beside),
            flags=flags,
            loop=loop,
            written=written,
            group=group,
        )
    except SequenceParallelError as refusal:
        raise refusal from fault
    assert info is not None
    return local, _told(info, agreed, is_filler=is_filler), agreed


def _own_part(
    batch: Any, mesh: SequenceMesh, options: ShardOptions, *, by_hand: bool
) -> tuple[Any, SequenceInfo | None, bool, Exception | None]:
    """Return this rank's part of a batch, what was whole and whether it holds fillers beside samples, or the error.

    That is sent to the other ranks: they would wait for ever.
    """
    try:
        beside = ignore_beside_others(batch)
        if by_hand or is_sharded(batch):
            return batch, hand_sharded_info(batch, mesh.layout, mesh.sequence_rank, options), beside, None
        return *shard_batch(batch, mesh.layout, mesh.sequence_rank, options), beside, None
    except Exception as fault:
        return batch, None, False, fault


def _rows(info: SequenceInfo | None, *, is_filler: bool, beside: bool) -> int:
    """Return how many rows of a batch count; below 0 where those of one loader do, and another's beside it do not."""
    rows = 0 if info is None or is_filler else info.rows
    return -rows if beside else rows


def _told(info: SequenceInfo, agreed: comm.SameBatch, *, is_filler: bool) -> SequenceInfo:
    """Return what was whole, with what ranks have told each other of it."""
    found = agreed.of_any
    info = replace(
        info, is_filler=is_filler, has_fillers=found.fillers, rows_of_groups=agreed.rows, uneven_entries=agreed.uneven
    )
    return replace(info, is_longer=found.longer, is_padded=found.padded, is_changed=found.changed)


def _is_whole_of_all(batch: Any, info: SequenceInfo | None, mesh: SequenceMesh, *, by_hand: bool) -> bool:
    """Return whether a batch that is not split must be the same on all ranks, too: it runs whole, or ranks split weights."""
    runs_whole = info is not None and info.is_whole and mesh.splits_samples
    return runs_whole or (mesh.tensor_parallel_size > 1 and not (by_hand or is_sharded(batch)))


def _words(fault: Exception | None) -> str | None:
    named = fault is None or isinstance(fault, SequenceParallelError)
    return None if fault is None else str(fault) if named else f"{type(fault).__name__}: {fault}"
