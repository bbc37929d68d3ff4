"""The oracle: plain attention over the whole sequence on one process. S x S memory: for tests, and for the preflight's short crops."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightning_sp.attention.mask import AttentionMask, document_ids


def reference_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask,
    scale: float | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Return softmax(scale q k^T + mask) v by its definition; zero where a query sees nothing.

    Shapes: q (B, H, S, D), k (B, K, S, D), v (B, K, S, E), sinks (H,) -> (B, H, S, E).
    """
    return dense_attention(q, k, v, allowed(mask, q.shape[2])[:, None].to(q.device), scale, sinks, softcap)


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor,
    scale: float | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Return attention by its definition under any mask, in the precision of its inputs.

    Shapes: q (B, H, S, D), k (B, K, T, D), v (B, K, T, E), seen (B or 1, H or 1, S, T), bool, sinks (H,) -> (B, H, S, E).
    """
    shared = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~seen, -math.inf)
    if sinks is None:
        # A row without a key has no softmax; whatever stands there is masked again.
        scores = scores.masked_fill(~seen.any(-1, keepdim=True), 0.0)
    else:
        scores = torch.cat([scores, sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)], -1)
    return torch.softmax(scores, -1)[..., : k.shape[2]].masked_fill(~seen, 0.0) @ v


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
