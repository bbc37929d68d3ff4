"""The oracle: plain attention over the whole sequence on one process. S x S memory: for tests, and for the preflight's short crops."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_sp.attention.spec.documents import document_ids
from lightning_sp.attention.spec.dropout import AttentionDropout
from lightning_sp.attention.spec.mask import AttentionMask
from lightning_sp.attention.spec.positions import whole_positions
from lightning_sp.attention.spec.score_mod import MaskMod, ScoreMod


def reference_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask,
    scale: float | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    score_mod: ScoreMod | None = None,
    dropout: AttentionDropout | None = None,
) -> Tensor:
    """Return softmax(change(scale q k^T) + mask) v by its definition; zero where a query sees nothing.

    Shapes: q (B, H, S, D), k (B, K, T, D), v (B, K, T, E), sinks (H,), bias (B or 1, H or 1, S or 1, T) -> (B, H, S, E).
    """
    visible = allowed(mask, q.shape[2], k.shape[2]).to(q.device)
    if isinstance(mask.mask_mod, MaskMod):
        visible = visible & mask.mask_mod.visible(whole_positions(q, k))
    return dense_attention(q, k, v, visible, scale, sinks, softcap, bias=bias, score_mod=score_mod, dropout=dropout)


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    scale: float | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    *,
    bias: Tensor | None = None,
    score_mod: ScoreMod | None = None,
    dropout: AttentionDropout | None = None,
) -> Tensor:
    """Return attention by its definition under any mask, in the precision of its inputs.

    Shapes: q (B, H, S, D), k (B, K, T, D), v (B, K, T, E), visible (B or 1, H or 1, S, T), bool, sinks (H,), bias as `visible` or with S 1
    -> (B, H, S, E).
    """
    shared = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores if bias is None else scores + bias
    positions = whole_positions(q, k)
    scores = scores if score_mod is None else score_mod.apply(scores, positions, score_mod.tensors)
    # What -inf in a bias or out of a function hides is hidden.
    visible = visible & (scores > -math.inf)
    scores = scores.masked_fill(~visible, -math.inf)
    if sinks is None:
        # A row without a key has no softmax; whatever stands there is masked again.
        scores = scores.masked_fill(~visible.any(-1, keepdim=True), 0.0)
    else:
        scores = torch.cat([scores, sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)], -1)
    weights = torch.softmax(scores, -1)[..., : k.shape[2]].masked_fill(~visible, 0.0)
    if dropout is None:
        return weights @ v
    factors = dropout.keep(positions).to(q.dtype) / (1.0 - dropout.probability)
    return weights * factors.to(weights.dtype) @ v


def allowed(mask: AttentionMask, length: int, key_length: int | None = None) -> Tensor:
    """Return which keys each query sees, by each option's definition, `mask_mod` apart.

    Shapes: () -> (rows, heads, S, T), bool; 1 where all are alike.
    """
    keys = length if key_length is None else key_length
    i, j = torch.arange(length)[:, None], torch.arange(keys)[None, :]
    visible = torch.ones(1, length, keys, dtype=torch.bool)
    if mask.causal:
        visible = visible & (j <= i)
    left, right = mask.window_size
    if left is not None:
        visible = visible & (j >= i - left)
    if right is not None:
        visible = visible & (j <= i + right)
    if mask.chunk_size is not None:
        visible = visible & (i // mask.chunk_size == j // mask.chunk_size)
    if mask.bidirectional is not None:
        for run in mask.bidirectional.unbind(1):
            start, end = run[:, 0, None, None], run[:, 1, None, None]
            visible = visible | ((start <= i) & (i < end) & (start <= j) & (j < end))
    if mask.boundaries is not None:
        other = mask.boundaries if mask.key_boundaries is None else mask.key_boundaries
        ids, other_ids = document_ids(mask.boundaries, length), document_ids(other, keys)
        visible = visible & (ids[:, :, None] == other_ids[:, None, :])
    if mask.valid is not None:
        start, end = mask.valid[:, 0, None, None], mask.valid[:, 1, None, None]
        visible = visible & (start <= j) & (j < end)
    whole = visible[:, None]
    if mask.dense is not None:
        _, _, queries, own_keys = mask.dense.shape
        whole = whole & F.pad(mask.dense.cpu(), (0, keys - own_keys, 0, 0 if queries == 1 else length - queries))
    return whole
