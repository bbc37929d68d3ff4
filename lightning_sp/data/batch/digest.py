"""A number that tells batches apart: the check that the ranks of one sequence read the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_sp.data.batch.contents.entries import plain_entries


def digest(batch: Any) -> int:
    """Return a number that differs, almost surely, between different batches: by their tensors, and arrays of numbers of numpy's."""
    total = 0
    for index, value in enumerate(plain_entries(batch).values()):
        for part, flat in enumerate(_numbers(value)):
            bits = flat.to(torch.int64) if not flat.is_floating_point() else flat.double().view(torch.int64)
            places = torch.arange(1, bits.numel() + 1, dtype=torch.int64, device=bits.device)
            total ^= int(_mixed(bits * 2654435761 + _mixed(places + 97 * (index + 1) + 131 * part)).sum().item())
    return total & 0x7FFFFFFFFFFFFFFF


def _mixed(numbers: Tensor) -> Tensor:
    """Return numbers of which each bit says something of all that were given: a sum of such is of no order or sign in which it was not made."""
    # SplitMix64's steps, but for shifts that keep the sign.
    mixed = (numbers ^ (numbers >> 30)) * -0x40A7B892E31B1A47
    mixed = (mixed ^ (mixed >> 27)) * -0x6B2FB644ECCEEE15
    return mixed ^ (mixed >> 31)


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
