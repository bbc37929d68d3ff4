"""A small piece of a batch for the preflight: a few rows, one window of tokens that holds targets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

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
from lightning_sp.layout import SequenceLayout, merge

# Two rows, so that what mixes rows shows; more would only cost.
ROWS = 2
LEAST_TOKENS = 64


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


def crop_batch(batch: Any, options: ShardOptions, layout: SequenceLayout, wanted: int | None = None) -> Crop:
    """Return the first crop of a whole batch that holds a target; where none does, the first one, whose `num_targets` is 0.

    Windows across the edge of two documents come first.
    """
    entries = _entries(batch)
    dims = _sequence_dims(entries, options)
    rows, length = _extent(entries, dims)
    tokens = crop_tokens(length, layout, wanted)
    labels = _shifted_labels(entries, options)
    places = entries.get("position_ids")
    first: Crop | None = None
    for row in range(0, rows, ROWS):
        last = min(rows, row + ROWS)
        for start in _starts(places[row:last] if isinstance(places, Tensor) else None, length, tokens):
            targets = None if labels is None else labels[row:last, start : start + tokens]
            count = None if targets is None else int((targets != IGNORE_INDEX).sum())
            if count == 0 and first is not None:
                continue
            found = {n: _cut(v, dims.get(n), rows, (row, last), (start, tokens)) for n, v in entries.items()}
            crop = Crop(_rebuild_plain(batch, found), last - row, tokens, count)
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
    sequence_group: ProcessGroup,
    control_group: ProcessGroup | None,
) -> Crop:
    """Return rank 0's crop of its batch, on every rank.

    Args:
        batch: this rank's, whole; its part of it where `hand_sharded`.
        options: of sharding.
        layout: the degrees.
        wanted: see `crop_tokens`.
        hand_sharded: whether the parts must be merged first.
        sequence_group: ranks that share the sequence.
        control_group: the world. Both on a backend for the host.
    """
    if hand_sharded:
        batch = whole_batch(batch, options, layout, sequence_group)
    shared: Crop = comm.broadcast_object(crop_batch(batch, options, layout, wanted), control_group)
    return shared


def _starts(position_ids: Tensor | None, length: int, tokens: int) -> Iterator[int]:
    boundaries = None if position_ids is None or position_ids.dim() != 2 else boundaries_from_positions(position_ids)
    if boundaries is not None:
        edge = min(int(e) for e in boundaries.flatten() if e > 0)
        yield max(0, min(edge - tokens // 2, length - tokens))
    yield from range(0, length - tokens + 1, tokens)
    yield length - tokens


def _cut(value: Any, dim: int | None, rows: int, row_range: tuple[int, int], window: tuple[int, int]) -> Any:
    """Cut rows and window; a copy, for a view would carry the whole batch along when it is sent."""
    has_rows = dim != 0 and hasattr(value, "__len__") and not isinstance(value, (str, bytes, dict, set))
    if isinstance(value, Tensor) and value.dim() == 0:
        has_rows = False
    if has_rows and len(value) == rows:
        value = value[row_range[0] : row_range[1]]
    if dim is not None:
        value = value.narrow(dim, *window)
    return value.clone() if isinstance(value, Tensor) else value


def _rebuild_plain(batch: Any, entries: dict[str, Any]) -> Any:
    """Rebuild the structure of a batch, without the mark of a sharded one."""
    if isinstance(batch, Mapping):
        return entries
    if isinstance(batch, Tensor):
        return entries["input_ids"]
    values = list(entries.values())
    return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
