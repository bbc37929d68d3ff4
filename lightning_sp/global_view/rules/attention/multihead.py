"""`nn.MultiheadAttention`, whose function projects, attends and projects again: by the rules of its parts."""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_sp.global_view.calls.call import NO_RULE, Call, Rule, is_sequence
from lightning_sp.global_view.rules.attention.written_attention import Scores
from lightning_sp.global_view.tensors.sequence_tensor import whole_of

_NOT_CARRIED = ("bias_k", "bias_v", "static_k", "static_v")


def multi_head_attention(call: Call) -> Any:
    """Attend with a module's projections; the weights that it gives beside are noted, and made where they are used."""
    bound = inspect.signature(F.multi_head_attention_forward).bind(*call.args, **call.kwargs)
    bound.apply_defaults()
    given = bound.arguments
    if any(given[name] is not None for name in _NOT_CARRIED) or given["add_zero_attn"] or given["query"].dim() != 3:
        return NO_RULE
    heads, width = given["num_heads"], given["embed_dim_to_check"]
    q, k, v = _split_heads(_projected(given), heads)
    scores = (q @ k.mT) * (1 / math.sqrt(width // heads))
    if given["attn_mask"] is not None:
        scores = _hidden(scores, _by_heads(given["attn_mask"], heads))
    elif given["is_causal"]:
        scores = scores.masked_fill(
            torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1), -torch.inf
        )
    if given["key_padding_mask"] is not None:
        padding = given["key_padding_mask"]
        scores = _hidden(scores, (padding.whole() if is_sequence(padding) else padding)[:, None, None])
    weights = F.dropout(scores.softmax(-1), given["dropout_p"], given["training"])
    out = (weights @ v).permute(2, 0, 1, 3).flatten(2)
    shown = _shown(weights, given["average_attn_weights"]) if given["need_weights"] else None
    return F.linear(out, given["out_proj_weight"], given["out_proj_bias"]), shown


def _shown(weights: Any, is_averaged: bool) -> Any:
    """Return weights as the module gives them beside: their mean over the heads, unless it was told otherwise."""
    if not is_averaged:
        return weights
    if not isinstance(weights, Scores):
        return weights.mean(1)
    return Scores(replace(weights.attention, is_averaged=True), weights.lead[:-1], weights.dtype)


def _projected(given: dict[str, Any]) -> list[Any]:
    inputs = [given["query"], given["key"], given["value"]]
    if given["use_separate_proj_weight"]:
        weights = [given[f"{name}_proj_weight"] for name in ("q", "k", "v")]
    else:
        weights = list(given["in_proj_weight"].chunk(3))
    biases = [None] * 3 if given["in_proj_bias"] is None else given["in_proj_bias"].chunk(3)
    return [F.linear(x, weight, bias) for x, weight, bias in zip(inputs, weights, biases, strict=True)]


def _split_heads(inputs: list[Any], heads: int) -> list[Any]:
    """Shapes: (S, B, E) -> (B, H, S, D)."""
    return [x.unflatten(-1, (heads, -1)).permute(1, 2, 0, 3) for x in inputs]


def _by_heads(mask: Any, heads: int) -> Any:
    """Return a mask with rows and heads apart. Shapes: (S, T) as it is, (B * H, S, T) -> (B, H, S, T)."""
    whole = mask.whole() if is_sequence(mask) else mask
    return whole if whole.dim() == 2 else whole.unflatten(0, (-1, heads))


def _hidden(scores: Any, mask: Tensor) -> Any:
    """Hide keys where a mask is True, or add it."""
    return scores.masked_fill(mask, -torch.inf) if mask.dtype == torch.bool else scores + mask


def left_aligned(call: Call) -> bool:
    """Say whether a mask of each row's tokens is true up to one of them."""
    seen = whole_of(call.args[1]).bool()
    return not bool((seen[:, 1:] & ~seen[:, :-1]).any())


RULES: dict[str, Rule] = {
    "multi_head_attention_forward": multi_head_attention,
    "nested_tensor_from_mask_left_aligned": left_aligned,
}
