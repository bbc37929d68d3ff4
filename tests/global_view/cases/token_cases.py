"""Attention of torch's own function beyond a sequence to itself, pairs of tokens, and tokens that numbers choose, as users' models have them."""

from __future__ import annotations

import warnings
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.global_view.whole import Case, E, H, Whole


class Reversed(torch.autograd.Function):
    """The reversal of a gradient, as domain-adversarial training writes it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return -0.3 * grads[0]


reverse = Reversed.apply


def smeared(x: Tensor, factor: float) -> Tensor:
    """As older repositories fuse what is done number by number; here along the sequence, too."""
    return x * 0.5 * (1.0 + torch.tanh(factor * x)) + x.mean(1, keepdim=True)


@lru_cache
def scripted() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated
        return torch.jit.script(smeared)


def heads(x: Tensor, number: int = H) -> Tensor:
    return x.unflatten(-1, (number, -1)).transpose(-3, -2)


def latents(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Tensor:
    """A few whole queries read the sequence, with a padding mask, as Perceiver's latents do."""
    queries = heads(w.table[:5].expand(2, -1, -1))
    return F.scaled_dot_product_attention(queries, heads(x), heads(x.sin()), attn_mask=mask[:, None, None].bool())


def a_memory(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Tensor:
    """The sequence reads whole keys, fewer heads of them, none of which the last tokens' mask leaves."""
    keys = heads(w.table[:5].expand(2, -1, -1)[..., :4], 2)
    seen = (mask[:, None, :, None] == 1) & (torch.arange(5) < 4)
    return F.scaled_dot_product_attention(heads(x), keys, keys.cos(), attn_mask=seen, enable_gqa=True).transpose(1, 2)


def causal_memory(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Tensor:
    keys = heads(w.table.expand(2, -1, -1))
    first = F.scaled_dot_product_attention(heads(x), keys, keys, is_causal=True, scale=0.3).transpose(1, 2)
    bias = w.relative[..., : keys.shape[-2]]
    return first + F.scaled_dot_product_attention(heads(x), keys, keys, attn_mask=bias).transpose(1, 2)


def within_blocks(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Tensor:
    """Patches of three tokens that attend within themselves, as MegaByte's local model does, and to the same place of all patches."""
    patches = x[:, :12].reshape(2, 4, 3, E)
    rows = heads(patches.reshape(8, 3, E))
    within = F.scaled_dot_product_attention(rows, rows.sin(), rows, is_causal=True).transpose(1, 2).reshape(2, 4, 3, E)
    across = heads((patches + within).transpose(1, 2))
    return (
        within + F.scaled_dot_product_attention(across, across, across).transpose(2, 3).flatten(3).transpose(1, 2)
    ).flatten(1, 2)


def interleaved(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Tensor:
    """Returns, states and actions of each time one after the other, as the Decision Transformer has them."""
    b, s, _ = x.shape
    all_three = torch.stack([x, x.sin(), F.linear(x, w.weight)], 2).reshape(b, 3 * s, E)
    out = F.scaled_dot_product_attention(*[heads(all_three)] * 3, is_causal=True).transpose(1, 2).flatten(2)
    return (all_three + out).view(b, s, 3, E)[:, :, 1]


def flattened(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Tensor:
    """A head over all tokens and features at once, as time series and classifiers have it."""
    return F.linear(x.flatten(1), w.mixing[:3, :, None].expand(-1, -1, E).flatten(1) * 0.3, w.bias[:3])


def pairs(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Tensor:
    """Additive attention, and a triangle's product of what pairs of tokens have."""
    z = (x[:, :, None] + F.linear(x, w.weight)[:, None]).tanh()
    both = torch.einsum("bikc,bjkc->bijc", z, z.cos())
    return both.softmax(2).mean(-1) @ x


def pairs_beside_each_other(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Tensor:
    """Messages between each two tokens, as graph networks have them: https://arxiv.org/abs/2102.09844."""
    s = x.shape[1]
    first, second = x[:, :, None].expand(-1, -1, s, -1), x[:, None].expand(-1, s, -1, -1)
    distance = (first - second).square().sum(-1, keepdim=True)
    messages = torch.cat([second.sin(), first, distance], -1)
    return torch.stack([first, second.cos()], 1).sum((1, 3)) + messages[..., : x.shape[2]].tanh().sum(2)


def no_token(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Tensor:
    """A memory that is empty in the first step."""
    return torch.cat([x[:, :0], x, x[:, -2:]], 1).sin() + torch.cat([w.positions[:0].expand(2, -1, -1), x, x[:, :2]], 1)


def single_ones(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Tensor:
    """As a CRF scores its tags: a token, beside indices of rows and classes; torch takes the single one first."""
    time_first, rows = x.transpose(0, 1), torch.arange(2)
    return (
        time_first[3, rows, ids[:, 4] % E] + time_first[-1, rows, torch.tensor([1, 5])] + x[0, torch.tensor([2, 7]), 3]
    )


def copied(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Tensor:
    """Every second token goes through a layer, and back to its place; others are added to."""
    at = torch.arange(0, x.shape[1], 2)
    y = x.index_copy(1, at, F.linear(x[:, at], w.weight).sin())
    return y.index_add(1, torch.tensor([1, 1, 6]), w.rows[:, None].expand(-1, 3, -1), alpha=2)


TOKEN_CASES: dict[str, Case] = {
    "attention pooling by latents": latents,
    "attention to a memory": a_memory,
    "attention to a memory, causal and biased": causal_memory,
    "attention within patches": within_blocks,
    "attention of interleaved tokens": interleaved,
    "rows of all tokens": flattened,
    "pairs of tokens": pairs,
    "pairs of tokens beside each other": pairs_beside_each_other,
    "an empty memory": no_token,
    "gathered by single ones": single_ones,
    "tokens copied into their places": copied,
    "a scripted function": lambda x, ids, mask, w: scripted()(x, 0.8),
    "a gradient reversed": lambda x, ids, mask, w: Reversed.apply(x * 2).sin(),
    "a gradient reversed by a name of its own": lambda x, ids, mask, w: reverse(x * 2).sin(),
}
