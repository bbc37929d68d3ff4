"""Histograms of the validated labels, over all ranks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from lightning.pytorch import Trainer
from torch import Tensor


def add_counts(first: Tensor, second: Tensor) -> Tensor:
    """Add two histograms that may end at different ids."""
    size = max(first.numel(), second.numel())
    return F.pad(first, (0, size - first.numel())) + F.pad(second, (0, size - second.numel()))


def sum_counts(trainer: Trainer, counts: Tensor) -> Tensor:
    """Add all ranks' histograms. Every rank enters."""
    size = trainer.strategy.reduce(torch.tensor(counts.numel(), device=counts.device), reduce_op="max")
    padded = F.pad(counts, (0, int(size) - counts.numel()))
    total: Tensor = trainer.strategy.reduce(padded, reduce_op="sum")
    return total
