"""A number that tells batches apart: the check that the ranks of one sequence read the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_sp import comm
from lightning_sp.data.batch.contents.entries import plain_entries

# Numbers at a time, which a core's cache holds.
_BLOCK = 2**16
# Odd numbers without a pattern, of SplitMix64.
_FIRST, _OF_PLACES, _LAST = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15


def digest(batch: Any) -> int:
    """Return a number that differs, almost surely, between different batches: by their tensors, numpy's arrays of numbers, and numbers."""
    entries = plain_entries(batch)
    plain = {name: found for name, value in entries.items() if (found := _plain_numbers(value)) is not None}
    total = comm.digest_of(plain) if plain else 0
    for index, value in enumerate(entries.values()):
        for part, flat in enumerate(_numbers(value)):
            total ^= _of_numbers(flat, 97 * (index + 1) + 131 * part)
    return total & 0x7FFFFFFFFFFFFFFF


def _plain_numbers(value: Any) -> Any:
    """Return a number of Python's or NumPy's, and those of a list; None of anything else."""
    if isinstance(value, (list, tuple)):
        found = [_plain_numbers(each) for each in value]
        return None if all(each is None for each in found) else found
    return value if isinstance(value, (int, float, complex, np.number)) else None


def _of_numbers(flat: Tensor, salt: int) -> int:
    """Return a sum over numbers, each mixed with its place: a sign or an order moves bits of it that others do not move back."""
    places = torch.arange(salt, salt + min(_BLOCK, flat.numel()), dtype=torch.int64, device=flat.device).mul_(
        _OF_PLACES
    )
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start, block in zip(range(0, flat.numel(), _BLOCK), torch.split(flat, _BLOCK), strict=True):
        bits = block.double().view(torch.int64) if flat.is_floating_point() else block.to(torch.int64)
        mixed = (bits * _FIRST).add_(places[: len(bits)]).add_(_wrapped(start * _OF_PLACES))
        total += mixed.bitwise_xor_(mixed >> 32).mul_(_LAST).sum()
    return int(total.item())


def _wrapped(number: int) -> int:
    """Return a number as 64 bits have it."""
    return (number + 2**63) % 2**64 - 2**63


def _numbers(value: Any) -> list[Tensor]:
    """Return the numbers of an entry, flat: of a sparse tensor where they stand and what they are."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        value = torch.as_tensor(np.ascontiguousarray(value.astype(value.dtype.newbyteorder("="))))
    if not isinstance(value, Tensor) or not value.numel():
        return []
    if value.layout != torch.strided:
        found = value.detach().to_sparse().coalesce()  # one of compressed rows, too
        return [*_numbers(found.indices()), *_numbers(found.values())]
    flat = value.detach().reshape(-1)
    return [torch.view_as_real(flat.resolve_conj()).reshape(-1) if flat.is_complex() else flat]
