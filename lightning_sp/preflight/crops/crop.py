"""A small piece of a batch for the preflight: a few rows, one window of tokens that holds targets."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_sp.attention.spec.documents import boundaries_from_positions
from lightning_sp.batch_structure import is_plain_dict, with_entries
from lightning_sp.data.batch.contents.entries import (
    batch_entries,
    extent,
    plain_entries,
)
from lightning_sp.data.batch.contents.several_sequences import BatchSequences, Named, batch_sequences
from lightning_sp.data.batch.contents.targets import batch_targets
from lightning_sp.data.batch.shard_options import ShardOptions
from lightning_sp.labels import IGNORE_INDEX
from lightning_sp.layout import SequenceLayout
from lightning_sp.preflight.crops.media import has_rows_of_its_own, placeholders

# Two rows, so that what mixes rows shows; more would only cost.
ROWS = 2
LEAST_TOKENS = 64


@dataclass(frozen=True, kw_only=True)
class Crop:
    """Part of a whole batch.

    Args:
        batch: of the same structure as the batch it was cut from, in memory of its own.
        rows: samples in it.
        tokens: length of its sequences.
        num_targets: tokens with a target; None where the labels are not known.
        uneven_entries: data-parallel groups hold other entries: images in some alone, say.
    """

    batch: Any
    rows: int
    tokens: int
    num_targets: int | None
    uneven_entries: bool = False


def crop_tokens(length: int, layout: SequenceLayout, wanted: int | None = None) -> int:
    """Return the length of a crop: about `wanted`, short of a multiple by as much as the sequence itself, so that it is padded alike.

    Args:
        length: tokens of the whole sequence.
        layout: the degrees.
        wanted: rounded up to what the degrees divide; None chooses.
    """
    padded = layout.padded_length(wanted or max(8 * layout.multiple, LEAST_TOKENS))
    return min(length, padded - (layout.padded_length(length) - length))


def longer_tokens(rows: int, length: int, layout: SequenceLayout, *, least: int) -> int:
    """Return the length of one row that costs no more than a rank's own part of a batch, or `least` tokens; a multiple of the degrees.

    Its pieces and those of the whole sequence leave the same rest when divided by 2, 3, 4, 5 and 16, or by fewer of these where it is short:
    groups of neighbours that the pieces of the one cut are cut by those of the other.

    Args:
        rows: of the batch.
        length: tokens of the whole sequence.
        layout: the degrees.
        least: tokens that are always affordable.
    """
    multiple, whole = layout.multiple, layout.padded_length(length)
    most = max(rows * whole // layout.size, least) // multiple
    if most * multiple >= whole:
        return whole
    for modulus in (240, 48, 16, 4, 2):
        piece = most - (most - whole // multiple) % modulus
        if 2 * piece > most:
            return piece * multiple
    return most * multiple


def uneven_tokens(length: int, layout: SequenceLayout) -> int:
    """Return the length of a crop, no longer than a sequence, whose pieces no group of 2, 3, 4 or 5 neighbouring tokens fills.

    Args:
        length: tokens of the whole sequence.
        layout: the degrees.
    """
    pieces = layout.padded_length(length) // layout.multiple
    return layout.multiple * next(each for each in (13, 11, 7, 5, 3, 1) if each <= pieces)


def is_uneven(length: int, layout: SequenceLayout) -> bool:
    """Return whether groups of 2, 3, 4 and 5 neighbouring tokens are cut by the pieces of a sequence, if tokens are grouped at all."""
    return math.gcd(layout.padded_length(length) // layout.multiple, 30) == 1


def crop_extent(
    batch: Any, options: ShardOptions, layout: SequenceLayout, wanted: int | None = None, *, most_rows: int = ROWS
) -> tuple[int, ...]:
    """Return the (rows, tokens) of a whole batch's crops, and the tokens of each other sequence that it holds."""
    entries = batch_entries(batch, options)
    rows, *lengths = whole_extent(batch, options)
    span = placeholders(entries, options)
    if span is not None:
        least = span[1] - span[0]
        wanted = max(wanted or max(8 * layout.multiple, LEAST_TOKENS), least + layout.multiple)
    tokens = [crop_tokens(each, layout, wanted) for each in lengths]
    others = other_lengths(batch, options)
    while not others.isdisjoint(tokens) and tokens != lengths:
        # A crop as long as another entry would be taken for it.
        tokens = [min(whole, each + layout.multiple) for whole, each in zip(lengths, tokens, strict=True)]
    return rows if has_rows_of_its_own(entries, rows) else min(rows, most_rows), *tokens


def whole_extent(batch: Any, options: ShardOptions) -> tuple[int, ...]:
    """Return the (rows, tokens) of a whole batch, and the tokens of each other sequence that it holds."""
    entries = batch_entries(batch, options)
    found = batch_sequences(entries, options)
    others = [extent(entries, dims, found.others(dims))[1] for _, dims in _others(found)]
    return *extent(entries, found.own, found.others(found.own)), *others


def _others(found: BatchSequences) -> list[tuple[Named, Mapping[str, int]]]:
    """Return the sequences beside the one that a batch is told by, an encoder's first."""
    of_encoder = [(Named(), found.encoder)] if found.encoder else []
    return [*of_encoder, *((each.named, each.dims) for each in found.beside)]


def common_extent(
    extents: Sequence[tuple[int, ...]], wholes: Sequence[tuple[int, ...]], holds_media: Sequence[bool]
) -> tuple[int, ...]:
    """Return the extent of a crop that all groups can give, and that holds what each needs if it can.

    Args:
        extents: of each group's crop.
        wholes: of each group's batch.
        holds_media: whether a group's crop must hold placeholders.
    """
    least = tuple(min(each) for each in zip(*extents, strict=True))
    largest = tuple(max(each) for each in zip(*extents, strict=True))
    possible = all(n <= min(each) for n, each in zip(largest, zip(*wholes, strict=True), strict=True))
    return largest if any(holds_media) and possible else least


def other_lengths(batch: Any, options: ShardOptions) -> set[int]:
    """Return what a batch's entries that carry no sequence have in the place of one."""
    entries = batch_entries(batch, options)
    found = batch_sequences(entries, options)
    known = {*found.dims, *found.pairs}
    return {int(v.shape[1]) for n, v in entries.items() if n not in known and isinstance(v, Tensor) and v.dim() > 1}


def crop_batch(batch: Any, options: ShardOptions, size: tuple[int, ...]) -> Crop:
    """Return the first crop of a whole batch that holds a target; where none does, the first one, whose `num_targets` is 0.

    Windows across the edge of two documents come first. Of each other sequence it is the window that padding leaves most of.

    Args:
        batch: a whole batch.
        options: of sharding.
        size: rows and tokens of the crop, no more than the batch has, as `crop_extent` returns them.
    """
    entries = batch_entries(batch, options)
    found = batch_sequences(entries, options)
    dims, rows_each = found.dims, {name: each.rows_each for each in found.beside for name in each.dims}
    rows, length = extent(entries, found.own, found.others(found.own))
    height, tokens, *others_tokens = size
    labels = batch_targets(entries, found.own, options)
    position_ids = entries.get("position_ids") if not found.encoder else None
    span = placeholders(entries, options)
    first: Crop | None = None
    for last in (min(rows, row + height) for row in range(0, rows, height)):
        row = last - height
        windows: dict[str, tuple[int, int]] = {}
        of_lengths: dict[int, tuple[int, int]] = {}
        for (named, of_other), wanted in zip(_others(found), others_tokens, strict=True):
            each = rows_each.get(next(iter(of_other)), 1)
            whole, window = _least_padded(entries, of_other, named, (each * row, each * last), wanted)
            windows |= dict.fromkeys(of_other, window)
            of_lengths[whole] = window
        for start in _starts(
            position_ids[row:last] if isinstance(position_ids, Tensor) else None, length, tokens, span
        ):
            targets = None if labels is None else labels[row:last, start : start + tokens]
            count = None if targets is None else int((targets != IGNORE_INDEX).sum())
            if count == 0 and first is not None:
                continue
            windows |= dict.fromkeys(found.own, (start, tokens))
            of_lengths[length] = (start, tokens)
            held = {}
            for name, value in entries.items():
                each = rows_each.get(name, 1)
                cut = _cut(value, dims.get(name), each * rows, (each * row, each * last), windows.get(name))
                if name in found.pairs:
                    held[name] = _cut_pairs(cut, of_lengths)
                else:
                    held[name] = _cut_mask(cut, of_lengths) if name not in dims and _is_mask(value, of_lengths) else cut
            _end_rows(held, options.row_end)
            # Without a decoder's inputs that its model would make: it makes them of the crop's labels.
            held = {name: held[name] for name in plain_entries(batch)}
            crop = Crop(batch=rebuild_plain(batch, held), rows=height, tokens=tokens, num_targets=count)
            if count != 0:
                return crop
            first = crop
    assert first is not None
    return first


def _least_padded(
    entries: Mapping[str, Any], dims: Mapping[str, int], named: Named, row_range: tuple[int, int], tokens: int
) -> tuple[int, tuple[int, int]]:
    """Return a sequence's length and the (start, tokens) that most is left of by padding in the row that keeps least."""
    name, dim = next(iter(dims.items()))
    length = int(entries[name].shape[dim])
    mask = entries.get(named("attention_mask"))
    starts = [*range(0, length - tokens + 1, tokens), length - tokens]
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return length, (0, tokens)
    left = mask[slice(*row_range)] != 0
    return length, (max(starts, key=lambda start: int(left[:, start : start + tokens].sum(1).min())), tokens)


def _starts(position_ids: Tensor | None, length: int, tokens: int, span: tuple[int, int] | None) -> Iterator[int]:
    """Yield where a window may start: with a span that it must hold, there alone if it can."""
    if span is not None and span[1] - span[0] <= tokens:
        yield min(max(0, span[1] - tokens), length - tokens)
        yield min(span[0], length - tokens)
        return
    boundaries = None if position_ids is None or position_ids.dim() != 2 else boundaries_from_positions(position_ids)
    if boundaries is not None:
        edge = min(int(e) for e in boundaries.flatten() if e > 0)
        yield max(0, min(edge - tokens // 2, length - tokens))
    yield from range(0, length - tokens + 1, tokens)
    yield length - tokens


def _cut(value: Any, dim: int | None, rows: int, row_range: tuple[int, int], window: tuple[int, int] | None) -> Any:
    """Cut rows and window; a copy, for a view would carry the whole batch along when it is sent."""
    if has_rows(value, dim, rows):
        sparse = isinstance(value, Tensor) and value.layout != torch.strided
        value = value.index_select(0, torch.arange(*row_range)) if sparse else value[row_range[0] : row_range[1]]
    if dim is not None and window is not None:
        value = value.narrow(dim, *window)
    return value.clone() if isinstance(value, Tensor) else value


def _end_rows(entries: Mapping[str, Any], end: int | None) -> None:
    """Give each row whose end was cut off that token in the place of its last one, in place."""
    ids = entries.get("input_ids")
    if end is None or not isinstance(ids, Tensor) or ids.dim() != 2:
        return
    mask = entries.get("attention_mask")
    mask = mask if isinstance(mask, Tensor) and mask.shape == ids.shape else torch.ones_like(ids)
    last = ids.shape[1] - 1 - (mask != 0).long().flip(1).argmax(1)
    cut = ~((ids == end) & (mask != 0)).any(1)
    rows = torch.arange(len(ids))
    ids[rows[cut], last[cut]] = end


def _is_mask(value: Any, windows: Mapping[int, tuple[int, int]]) -> bool:
    """Return whether an entry says of queries and keys, or keys, of whole sequences: (rows or 1, heads or 1, S or 1, S)."""
    if not isinstance(value, Tensor) or value.dim() != 4:
        return False
    return value.shape[3] in windows and (value.shape[2] == 1 or value.shape[2] in windows)


def _cut_mask(value: Tensor, windows: Mapping[int, tuple[int, int]]) -> Tensor:
    queries, keys = value.shape[2:]
    value = value.narrow(3, *windows[keys])
    return (value if queries == 1 else value.narrow(2, *windows[queries])).clone()


def _cut_pairs(value: Tensor, windows: Mapping[int, tuple[int, int]]) -> Tensor:
    first = 0 if value.dim() == 2 else 1
    for dim in (first, first + 1):
        value = value.narrow(dim, *windows[value.shape[dim]])
    return value.clone()


def has_rows(value: Any, dim: int | None, rows: int) -> bool:
    """Return whether an entry of a batch holds something for each of its rows; `dim` carries its sequence, if any."""
    if dim == 0 or isinstance(value, (str, bytes, dict, set)) or (isinstance(value, Tensor) and value.dim() == 0):
        return False
    return hasattr(value, "__len__") and len(value) == rows


def rebuild_plain(batch: Any, entries: dict[str, Any]) -> Any:
    """Rebuild the structure of a batch, without the mark of a sharded one."""
    made = with_entries(batch, entries)
    return dict(made) if is_plain_dict(batch) else made
