"""The perplexity that a language model must beat: that of the tokens' own frequencies."""

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


def unigram_perplexity(counts: Tensor) -> float:
    """Return the perplexity, on the counted tokens themselves, of the model that knows their frequencies alone."""
    shares = counts[counts > 0].double() / counts.sum()
    return float(torch.exp(-(shares * shares.log()).sum()))
