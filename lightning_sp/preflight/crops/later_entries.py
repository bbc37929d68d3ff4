"""Entries that are one number in all first batches, as later ones may have them: a step may do nothing with what it is shown at first.

elapsed = gaps.cumsum(1)                                zeros on every part, until a gap is none
seen = batch["attention_mask"].float().mean(1)          1 on every part, until a row is padded
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor

from lightning_sp.data.batch.contents.entries import INPUTS, STANDARD_NAMES
from lightning_sp.data.batch.filler_marks import LOSS_MASKS, TARGETS
from lightning_sp.labels import IGNORE_INDEX, can_be_ignored

_MASK = "attention_mask"
# What says how others are to be read is no matter of chance; tokens themselves are shown by what they are compared with.
_OF_STRUCTURE = {*STANDARD_NAMES} - {"loss_weights"}
# Kinds of tokens, 0 and 1: a library's layers look them up in a table that may have one row, or make a mask of them.
_KINDS = "token_type_ids"
# Tokens of which some can be hidden.
_LEAST = 8
# One in so many tokens counts in a group that has fewer.
_FEW = 4


def with_other_numbers(entries: Mapping[str, Tensor], by_user: Collection[str] = ()) -> Iterator[tuple[str, Tensor]]:
    """Yield entries with other numbers, where each row has one alone: of float ones any above it, of masks 0 in places, else it or one more.

    Args:
        entries: that carry the sequence along dim 1.
        by_user: those that lines of the user's compute with.
    """
    for name, value in entries.items():
        if name == _KINDS and name in by_user and value.dim() == 2 and bool((value == value[:, :1]).all()):
            yield name, value ^ _drawn(value)
        is_mask = name.endswith("mask") and not name.endswith(_MASK)
        if is_mask and value.dim() == 2 and bool((value == 1).all()):
            yield name, value * ~_drawn(value)
        elif name not in _OF_STRUCTURE and value.dim() >= 2 and value.numel() and bool((value == value[:, :1]).all()):
            if value.is_floating_point():
                drawn = torch.rand(value.shape, generator=_generator(), dtype=torch.float64)
                yield name, value + drawn.to(value.dtype).to(value.device)
            elif not value.is_complex():
                yield name, value ^ _drawn(value) if value.dtype == torch.bool else value + _drawn(value)


def with_padding(entries: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return masks that hide the last tokens of each row, another number in every second, and the targets that are ignored then.

    Args:
        entries: that carry the sequence along dim 1.
    """
    found: dict[str, Tensor] = {}
    for name, value in entries.items():
        if not name.endswith(_MASK) or value.dim() != 2 or not bool((value == 1).all()) or value.shape[1] < _LEAST:
            continue
        length = value.shape[1]
        found[name] = value.clone()
        for rows, kept in ((slice(0, None, 2), length - length // 8), (slice(1, None, 2), length // 2)):
            found[name][rows, kept:] = 0
        for other, targets in entries.items():
            ignored = STANDARD_NAMES.get(other, (1, 0))[1] == IGNORE_INDEX
            if ignored and targets.shape == value.shape and not targets.is_floating_point():
                found[other] = can_be_ignored(targets).masked_fill(found[name] == 0, IGNORE_INDEX)
    return found


def with_uneven_counts(
    entries: Mapping[str, Tensor], numbers: Mapping[str, Collection[float]], rows: int
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield entries of which the first data-parallel group has fewer tokens that count, in words; all of them, then each kind by itself.

    Args:
        entries: of a crop of all groups, that carry the sequence along dim 1, or have a number for each row.
        numbers: that the step compares an entry's tokens with, what it leaves out say.
        rows: of the group.
    """
    ignored, hidden, left_out = {}, {}, {}
    for name, value in entries.items():
        if value.dim() == 1 and value.is_floating_point():
            hidden[name] = torch.cat([value[:rows] / _FEW, value[rows:]])
        if value.dim() != 2 or value.shape[1] < _LEAST or value.is_complex():
            continue
        is_of_classes = not value.is_floating_point() and value.dtype != torch.bool
        known = name.rpartition(".")[2]  # of a batch within the batch
        if name.endswith("mask") or known in LOSS_MASKS or (known not in _OF_STRUCTURE and _may_weigh(value)):
            hidden[name] = _first_rows_but_few(value, rows, 0)
        elif is_of_classes and (known not in _OF_STRUCTURE - {*INPUTS, *TARGETS}):
            if known in TARGETS:
                ignored[name] = _first_rows_but_few(can_be_ignored(value), rows, IGNORE_INDEX)
            if others := {*numbers.get(name, ())} - {IGNORE_INDEX}:
                left_out[name] = _first_rows_but_few(value, rows, min(others, key=abs))
    kinds = {"ignored targets": ignored, "hidden tokens": hidden, "tokens that the step looks for": left_out}
    kinds = {words: found for words, found in kinds.items() if found}
    if len(kinds) > 1:
        yield " and ".join(kinds), {name: value for found in kinds.values() for name, value in found.items()}
    yield from kinds.items()


def _may_weigh(value: Tensor) -> bool:
    return value.is_floating_point() or bool(((value == 0) | (value == 1)).all())


def _first_rows_but_few(value: Tensor, rows: int, number: float) -> Tensor:
    found = value.clone()
    found[:rows, max(1, value.shape[1] // _FEW) :] = number
    return found


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _drawn(value: Tensor) -> Tensor:
    return (torch.rand(value.shape, generator=_generator()) < 1 / 3).to(value.device)
