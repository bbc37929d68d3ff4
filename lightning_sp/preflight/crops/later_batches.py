"""Crops as later batches may be, where the first ones do not show what a step does: other tokens, other numbers, padding.

all of it in one crop        where the step does not run on that: each kind of it by itself, and of tokens each number
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from lightning_sp.batch_structure import entries_of, with_entries
from lightning_sp.data.batch.contents.entries import batch_entries
from lightning_sp.data.batch.contents.several_sequences import batch_sequences
from lightning_sp.data.batch.shard_options import ShardOptions
from lightning_sp.layout import SequenceLayout
from lightning_sp.preflight.crops.compared_tokens import with_compared
from lightning_sp.preflight.crops.crop import Crop
from lightning_sp.preflight.crops.later_entries import with_other_numbers, with_padding, with_uneven_counts
from lightning_sp.preflight.recording.compared import Compared, Entry

Attempt = Callable[[Crop, Crop, str], bool]


class _Later(NamedTuple):
    """What a crop has otherwise, in words, and the entries that have it."""

    words: str
    values: Mapping[str, Tensor]


def try_later_batches(
    crop: Crop,
    own: Crop,
    first_row: int,
    compared: Mapping[Entry, Compared],
    options: ShardOptions,
    layout: SequenceLayout,
    attempt: Attempt,
) -> None:
    """Have a step compared on crops as later batches may be. Every rank must call it, with the same crops.

    Args:
        crop: of all data-parallel groups.
        own: of this rank's group.
        first_row: of that, in the crop of all.
        compared: what the step has compared.
        options: which tensors carry the sequence.
        layout: the degrees.
        attempt: compares the step on other such crops, described in words, if it runs on them; returns whether it does.
    """
    entries, by_name = _entries(crop, compared, options)
    piece = max(1, layout.padded_length(crop.tokens) // layout.multiple)

    def is_shown(later: _Later) -> bool:
        of_group = {name: value[first_row : first_row + own.rows] for name, value in later.values.items()}
        return attempt(_with(crop, later.values), _with(own, of_group), later.words)

    kinds = [each for each in _kinds(entries, by_name, crop.rows, piece) if each]
    if len(kinds) > 1:
        first = [each[0] for each in kinds]
        values = {name: value for each in first for name, value in each.values.items()}
        if is_shown(_Later(", ".join(each.words for each in first), values)):
            return
    for kind in kinds:
        for each in kind:
            if is_shown(each):
                break


def try_uneven_counts(
    crop: Crop, own: Crop, first_row: int, compared: Mapping[Entry, Compared], options: ShardOptions, attempt: Attempt
) -> None:
    """Have a step tried on crops of which the first data-parallel group has fewer tokens that count. As `try_later_batches`.

    Args:
        crop: of all data-parallel groups.
        own: of this rank's group.
        first_row: of that, in the crop of all.
        compared: what the step has compared.
        options: which tensors carry the sequence.
        attempt: tries the step on such crops, described in words; returns whether it has told how groups count.
    """
    entries, by_name = _entries(crop, compared, options)
    numbers = {name: found.numbers for name, found in by_name.items()}
    held = batch_entries(crop.batch, options)
    of_rows = {name: v for name, v in held.items() if isinstance(v, Tensor) and v.shape == (crop.rows,)}
    for words, values in with_uneven_counts({**of_rows, **entries}, numbers, own.rows):
        of_group = {name: value[first_row : first_row + own.rows] for name, value in values.items()}
        if attempt(_with(crop, values), _with(own, of_group), f"fewer tokens that count in one group ({words})"):
            return


def _entries(
    crop: Crop, compared: Mapping[Entry, Compared], options: ShardOptions
) -> tuple[dict[str, Tensor], dict[str, Compared]]:
    """Return the entries that carry the sequence along dim 1, and by their names what a step has compared."""
    held = batch_entries(crop.batch, options)
    # Of several loaders, too, which the global view carries; passages of a question have rows of their own.
    dims = batch_sequences(held, options).dims
    entries = {name: held[name] for name, dim in dims.items() if dim == 1 and len(held[name]) in (1, crop.rows)}
    return entries, {name: found for path, found in compared.items() if (name := _name(path, entries)) is not None}


def _kinds(
    entries: Mapping[str, Tensor], compared: Mapping[str, Compared], rows: int, piece: int
) -> Iterator[list[_Later]]:
    """Yield what may be otherwise, kind by kind: all of a kind first."""
    yield [_Later(*each) for each in with_compared(entries, compared, rows, piece)]
    others = dict(with_other_numbers(entries, {name for name, found in compared.items() if found.by_user}))
    yield [_Later(f"other numbers in {', '.join(others)}", others)] if others else []
    # A library's layer is handed its mask, and is known.
    by_hand = {n: v for n, v in entries.items() if not n.endswith("mask") or compared.get(n, Compared()).by_user}
    padded = with_padding(by_hand)
    yield [_Later("padded rows", padded)] if padded else []


def _name(path: Entry, entries: Mapping[str, object]) -> str | None:
    """Return the entry that a step's argument is, by its keys in that: ((batch,), {}) comes first."""
    keys = [*map(str, path[2:])] or ["input_ids"]
    return next((name for name in (".".join(keys), keys[-1]) if name in entries), None)


def _with(crop: Crop, values: Mapping[str, Tensor]) -> Crop:
    return replace(crop, batch=with_entries(crop.batch, {**(entries_of(crop.batch) or {}), **values}))
