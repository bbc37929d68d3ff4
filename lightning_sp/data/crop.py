"""A small piece of a batch for the preflight: a few rows, one window of tokens that holds targets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_sp import comm
from lightning_sp.attention.mask import boundaries_from_positions
from lightning_sp.data.batch import (
    IGNORE_INDEX,
    ShardOptions,
    _entries,
    _extent,
    _sequence_dims,
    _shifted_labels,
)
from lightning_sp.errors import SequenceParallelError
from lightning_sp.layout import SequenceLayout, merge

# Two rows, so that what mixes rows shows; more would only cost.
ROWS = 2
LEAST_TOKENS = 64
# Groups whose crops differ: each adds its rows to what every rank runs whole.
MOST_GROUPS = 8


@dataclass(frozen=True)
class Crop:
    """Part of a whole batch.

    Args:
        batch: of the same structure as the batch it was cut from, in memory of its own.
        rows: samples in it.
        tokens: length of its sequences.
        num_targets: tokens with a target; None where the labels are not known.
    """

    batch: Any
    rows: int
    tokens: int
    num_targets: int | None


def crop_tokens(length: int, layout: SequenceLayout, wanted: int | None = None) -> int:
    """Return the length of a crop: about `wanted`, short of a multiple by as much as the sequence itself, so that it is padded alike.

    Args:
        length: tokens of the whole sequence.
        layout: the degrees.
        wanted: rounded up to what the degrees divide; None chooses.
    """
    padded = layout.padded_length(wanted or max(8 * layout.multiple, LEAST_TOKENS))
    return min(length, padded - (layout.padded_length(length) - length))


def crop_extent(
    batch: Any, options: ShardOptions, layout: SequenceLayout, wanted: int | None = None
) -> tuple[int, int]:
    """Return the (rows, tokens) of a whole batch's crops."""
    entries = _entries(batch)
    rows, length = _extent(entries, _sequence_dims(entries, options))
    return min(rows, ROWS), crop_tokens(length, layout, wanted)


def crop_batch(batch: Any, options: ShardOptions, extent: tuple[int, int]) -> Crop:
    """Return the first crop of a whole batch that holds a target; where none does, the first one, whose `num_targets` is 0.

    Windows across the edge of two documents come first.

    Args:
        batch: a whole batch.
        options: of sharding.
        extent: rows and tokens of the crop, no more than the batch has.
    """
    entries = _entries(batch)
    dims = _sequence_dims(entries, options)
    rows, length = _extent(entries, dims)
    height, tokens = extent
    labels = _shifted_labels(entries, options)
    places = entries.get("position_ids")
    first: Crop | None = None
    for last in (min(rows, row + height) for row in range(0, rows, height)):
        row = last - height
        for start in _starts(places[row:last] if isinstance(places, Tensor) else None, length, tokens):
            targets = None if labels is None else labels[row:last, start : start + tokens]
            count = None if targets is None else int((targets != IGNORE_INDEX).sum())
            if count == 0 and first is not None:
                continue
            found = {n: _cut(v, dims.get(n), rows, (row, last), (start, tokens)) for n, v in entries.items()}
            found = {
                n: _cut_mask(v, (start, tokens)) if _is_mask(entries[n], dims.get(n), length) else v
                for n, v in found.items()
            }
            crop = Crop(_rebuild_plain(batch, found), height, tokens, count)
            if count != 0:
                return crop
            first = crop
    assert first is not None
    return first


def whole_batch(batch: Any, options: ShardOptions, layout: SequenceLayout, group: ProcessGroup) -> Any:
    """Return the whole batch of which every rank of a sequence holds a part that was sharded by hand, on the CPU.

    Communicates: one all_gather for each tensor that carries the sequence, over a group that takes CPU tensors.
    """
    entries = _entries(batch)
    dims = _sequence_dims(entries, options)
    merged = {
        n: merge(comm.gather(v.cpu(), group), layout, dim=dims[n]) if n in dims else v for n, v in entries.items()
    }
    return _rebuild_plain(batch, merged)


def shared_crop(
    batch: Any,
    options: ShardOptions,
    layout: SequenceLayout,
    *,
    wanted: int | None,
    hand_sharded: bool,
    place: tuple[int, int],
    sequence_group: ProcessGroup,
    control_group: ProcessGroup | None,
) -> tuple[Crop, Crop]:
    """Return the crops of all data-parallel groups' batches as one, the same on every rank, and that of this rank's group.

    Args:
        batch: this rank's, whole; its part of it where `hand_sharded`.
        options: of sharding.
        layout: the degrees.
        wanted: see `crop_tokens`.
        hand_sharded: whether the parts must be merged first.
        place: (data-parallel rank, rank within the sequence's group).
        sequence_group: ranks that share the sequence.
        control_group: the world. Both on a backend for the host.

    Raises:
        SequenceParallelError: the groups' crops cannot be made into one batch.
    """
    if hand_sharded:
        batch = whole_batch(batch, options, layout, sequence_group)
    # The groups' batches may have other lengths; their crops are as large as all can give.
    extents = comm.gather_objects(crop_extent(batch, options, layout, wanted), control_group)
    own = crop_batch(batch, options, (min(r for r, _ in extents), min(t for _, t in extents)))
    gathered = comm.gather_objects(own if place[1] == 0 else None, control_group)
    crops: list[Crop] = [crop for crop in gathered if crop is not None]
    # Several groups may share a crop as long as each is shared by equally many: the mean over the tokens stays the same.
    kept = max(k for k in range(1, MOST_GROUPS + 1) if len(crops) % k == 0)
    return join_crops(crops[:kept], options), crops[place[0] % kept]


def join_crops(crops: list[Crop], options: ShardOptions) -> Crop:
    """Return crops of equal extent as one: the rows of all. What has no rows is the first's.

    Raises:
        SequenceParallelError: they hold different entries, or their sequences lie along dim 0 and have no rows.
    """
    first = crops[0]
    if len(crops) == 1:
        return first
    held = [_entries(crop.batch) for crop in crops]
    dims = _sequence_dims(held[0], options)
    kinds = [{name: _kind(value) for name, value in entries.items()} for entries in held]
    for group, other in enumerate(kinds):
        if other != kinds[0]:
            raise SequenceParallelError(
                f"preflight: the first batches of data-parallel groups 0 and {group} cannot be joined into the one that a single device would "
                f"train on: cut to {first.rows} x {first.tokens} tokens they hold {kinds[0]} and {other}; make the loader give all groups "
                "the same entries, or preflight=False trains without the check"
            )
    if 0 in dims.values():
        raise SequenceParallelError(
            f"preflight: the batches of {len(crops)} data-parallel groups cannot be joined: {[n for n, d in dims.items() if d == 0]} carry the "
            "sequence along dim 0 and have no rows; put the rows first, or preflight=False trains without the check"
        )
    joined = {name: _join([entries[name] for entries in held], dims.get(name), first.rows) for name in held[0]}
    counts = [crop.num_targets for crop in crops if crop.num_targets is not None]
    targets = sum(counts) if len(counts) == len(crops) else None
    return Crop(_rebuild_plain(first.batch, joined), first.rows * len(crops), first.tokens, targets)


def _kind(value: Any) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _join(values: list[Any], dim: int | None, rows: int) -> Any:
    if dim is not None and values[0].shape[0] == 1:  # one row for all, as position_ids may be
        values = [value.expand(rows, *value.shape[1:]) for value in values]
    if not all(_has_rows(value, dim, rows) for value in values):
        return values[0]
    if isinstance(values[0], Tensor):
        return torch.cat(values)
    if isinstance(values[0], np.ndarray):
        return np.concatenate(values)
    joined = [each for value in values for each in value]
    return tuple(joined) if isinstance(values[0], tuple) else joined


def _starts(position_ids: Tensor | None, length: int, tokens: int) -> Iterator[int]:
    boundaries = None if position_ids is None or position_ids.dim() != 2 else boundaries_from_positions(position_ids)
    if boundaries is not None:
        edge = min(int(e) for e in boundaries.flatten() if e > 0)
        yield max(0, min(edge - tokens // 2, length - tokens))
    yield from range(0, length - tokens + 1, tokens)
    yield length - tokens


def _cut(value: Any, dim: int | None, rows: int, row_range: tuple[int, int], window: tuple[int, int]) -> Any:
    """Cut rows and window; a copy, for a view would carry the whole batch along when it is sent."""
    if _has_rows(value, dim, rows):
        value = value[row_range[0] : row_range[1]]
    if dim is not None:
        value = value.narrow(dim, *window)
    return value.clone() if isinstance(value, Tensor) else value


def _is_mask(value: Any, dim: int | None, length: int) -> bool:
    """Return whether an entry says of queries and keys, or keys, of the whole sequence: (rows or 1, heads or 1, S or 1, S)."""
    if dim is not None or not isinstance(value, Tensor) or value.dim() != 4:
        return False
    return value.shape[3] == length and value.shape[2] in (1, length)


def _cut_mask(value: Tensor, window: tuple[int, int]) -> Tensor:
    value = value.narrow(3, *window)
    return (value if value.shape[2] == 1 else value.narrow(2, *window)).clone()


def _has_rows(value: Any, dim: int | None, rows: int) -> bool:
    if dim == 0 or isinstance(value, (str, bytes, dict, set)) or (isinstance(value, Tensor) and value.dim() == 0):
        return False
    return hasattr(value, "__len__") and len(value) == rows


def _rebuild_plain(batch: Any, entries: dict[str, Any]) -> Any:
    """Rebuild the structure of a batch, without the mark of a sharded one."""
    if isinstance(batch, Mapping):
        return entries
    if isinstance(batch, Tensor):
        return entries["input_ids"]
    values = list(entries.values())
    return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
