"""A number that tells batches apart: the check that the ranks of one sequence read the same."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_sp.data.batch.contents.entries import plain_entries


def digest(batch: Any) -> int:
    """Return a number that differs, almost surely, between different batches."""
    total = 0
    for index, value in enumerate(plain_entries(batch).values()):
        if isinstance(value, Tensor) and value.numel():
            flat = value.detach().reshape(-1)
            bits = flat.to(torch.int64) if not flat.is_floating_point() else flat.double().view(torch.int64)
            weights = torch.arange(1, bits.numel() + 1, dtype=torch.int64, device=bits.device)
            total ^= int((bits * (weights * 2654435761 + 97 * (index + 1))).sum().item())
    return total & 0x7FFFFFFFFFFFFFFF
