"""Drawn tensors for the attention's tests."""

from __future__ import annotations

import torch


def tensors(*shapes, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
