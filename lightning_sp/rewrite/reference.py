"""A whole sequence's attention by its definition, for the preflight's short crops, where torch's own function cannot do it."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_sp.attention.reference import dense_attention
from lightning_sp.attention.spec.dropout import AttentionDropout
from lightning_sp.attention.spec.score_mod import ScoreMod


def whole_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    *,
    bias: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    score_mod: ScoreMod | None = None,
    dropout: AttentionDropout | None = None,
) -> Tensor:
    """Return the attention of a short whole sequence.

    Args:
        q: queries.
        k: keys, of as many heads or fewer.
        v: values.
        mask: bool, or floating point, added to the scores; None for all.
        bias: added to the scores, besides.
        causal: whether a query sees no key after its own position, besides.
        scale: of q k^T; None for 1 / sqrt(D).
        sinks: see `sequence_parallel_attention`, as the rest.
        softcap: of the scores.
        score_mod: of the scores, after the mask's numbers.
        dropout: of the weights.

    Shapes: q (B, H, S, D), k and v (B, K, T, D), mask (..., S or 1, T) -> (B, H, S, D).
    """
    shape = (1, 1, q.shape[2], k.shape[2])
    visible = torch.ones(shape, dtype=torch.bool, device=q.device)
    visible = visible.tril() if causal else visible
    if mask is not None and mask.dtype == torch.bool:
        visible = visible & mask
    elif mask is not None:
        bias = mask if bias is None else bias + mask
    return dense_attention(q, k, v, visible, scale, sinks, softcap, bias=bias, score_mod=score_mod, dropout=dropout)
