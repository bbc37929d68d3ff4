"""The oracle: plain attention over the whole sequence on one process. S x S memory, for tests and small checks only."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightning_sp.attention.mask import AttentionMask, document_ids


def reference_attention(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float | None = None) -> Tensor:
    """Return softmax(scale q k^T + mask) v by its definition; zero where a query sees nothing.

    Shapes: q (B, H, S, D), k and v (B, K, S, D) -> (B, H, S, D).
    """
    shared, length = q.shape[1] // k.shape[1], q.shape[2]
    k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
    seen = allowed(mask, length)[:, None].to(q.device)
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores.masked_fill(~seen, -math.inf).masked_fill(~seen.any(-1, keepdim=True), 0.0)
    return torch.softmax(scores, -1).masked_fill(~seen, 0.0) @ v


def allowed(mask: AttentionMask, length: int) -> Tensor:
    """Return which keys each query sees, by each option's definition.

    Shapes: () -> (rows, S, S), bool; rows = 1 where all are alike.
    """
    i, j = torch.arange(length)[:, None], torch.arange(length)[None, :]
    seen = torch.ones(1, length, length, dtype=torch.bool)
    if mask.causal:
        seen = seen & (j <= i)
    left, right = mask.window_size
    if left is not None:
        seen = seen & (j >= i - left)
    if right is not None:
        seen = seen & (j <= i + right)
    if mask.chunk_size is not None:
        seen = seen & (i // mask.chunk_size == j // mask.chunk_size)
    if mask.bidirectional is not None:
        for run in mask.bidirectional.unbind(1):
            start, end = run[:, 0, None, None], run[:, 1, None, None]
            seen = seen | ((start <= i) & (i < end) & (start <= j) & (j < end))
    if mask.boundaries is not None:
        ids = document_ids(mask.boundaries, length)
        seen = seen & (ids[:, :, None] == ids[:, None, :])
    if mask.valid is not None:
        start, end = mask.valid[:, 0, None, None], mask.valid[:, 1, None, None]
        seen = seen & (start <= j) & (j < end)
    return seen
