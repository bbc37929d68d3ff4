"""The oracle: plain attention over the whole sequence on one process. S x S memory, for tests and small checks only."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightning_sp.attention.mask import AttentionMask, document_ids


def reference_attention(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float | None = None) -> Tensor:
    """Return softmax(scale q k^T + mask) v by its definition.

    Shapes: q (B, H, S, D), k and v (B, K, S, D) -> (B, H, S, D).
    """
    shared, length = q.shape[1] // k.shape[1], q.shape[2]
    k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
    allowed = torch.ones(1, length, length, dtype=torch.bool)
    if mask.causal:
        allowed = allowed.tril()
    if mask.boundaries is not None:
        ids = document_ids(mask.boundaries, length)
        allowed = allowed & (ids[:, :, None] == ids[:, None, :])
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    return torch.softmax(scores.masked_fill(~allowed[:, None].to(q.device), -math.inf), -1) @ v
