"""The dtype of sums."""

from __future__ import annotations

import torch


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which partials are accumulated: never below float32."""
    return torch.promote_types(dtype, torch.float32)
