"""Entries that are one number in all first batches, as later ones may have them: a step may do nothing with what it is shown at first.

elapsed = gaps.cumsum(1)                                zeros on every part, until a gap is none
seen = batch["attention_mask"].float().mean(1)          1 on every part, until a row is padded
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from lightning_sp.data.batch.contents.entries import STANDARD_NAMES
from lightning_sp.labels import IGNORE_INDEX

_MASK = "attention_mask"
# What says how others are to be read is no matter of chance; tokens themselves are shown by what they are compared with.
_OF_STRUCTURE = {*STANDARD_NAMES} - {"loss_weights"}
# Tokens of which some can be hidden.
_LEAST = 8


def with_other_numbers(entries: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield entries with other numbers, where each row has one alone: of float ones any above it, of masks 0 in places, else it or one more.

    Args:
        entries: that carry the sequence along dim 1.
    """
    for name, value in entries.items():
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
                found[other] = targets.masked_fill(found[name] == 0, IGNORE_INDEX)
    return found


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _drawn(value: Tensor) -> Tensor:
    return (torch.rand(value.shape, generator=_generator()) < 1 / 3).to(value.device)
