"""What a drawn model may do to its hidden states: attention in ten ways, and what else looks along a sequence.

Legend: B rows, S tokens, D = WIDTH.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, MAX_TOKENS = 16, 2, 64


class Operation(NamedTuple):
    """One operation: its module, and what it makes of hidden states (B, S, D) and ids (B, S). Ids of 0 are padding."""

    module: Callable[[], nn.Module]
    run: Callable[[Any, Tensor, Tensor], Tensor]


def _linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def _split(x: Tensor) -> Tensor:
    return x.view(*x.shape[:2], HEADS, WIDTH // HEADS).transpose(1, 2)


def _join(x: Tensor) -> Tensor:
    return x.transpose(1, 2).reshape(x.shape[0], -1, WIDTH)


def _positions(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1], device=x.device)


def _back(x: Tensor) -> Tensor:
    """Return how many tokens a key lies before a query: (S, S)."""
    return _positions(x)[:, None] - _positions(x)[None]


def _by_mask(mask: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda q, k, v, h, ids: F.scaled_dot_product_attention(q, k, v, attn_mask=mask(h, ids))


def _by_hand(q: Tensor, k: Tensor, v: Tensor, h: Tensor, ids: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    return scores.masked_fill(_back(h) < 0, torch.finfo(scores.dtype).min).softmax(-1) @ v


def _by_einsum(q: Tensor, k: Tensor, v: Tensor, h: Tensor, ids: Tensor) -> Tensor:
    return torch.einsum("bhst,bhtd->bhsd", torch.einsum("bhsd,bhtd->bhst", q, k).softmax(-1), v)


def _linear_attention(q: Tensor, k: Tensor, v: Tensor, h: Tensor, ids: Tensor) -> Tensor:
    q, k = F.elu(q) + 1, F.elu(k) + 1
    sums = torch.einsum("bhsd,bhse->bhde", k, v)
    return torch.einsum("bhsd,bhde->bhse", q, sums) / (q * k.sum(2, keepdim=True)).sum(-1, keepdim=True)


def _linear_causal_attention(q: Tensor, k: Tensor, v: Tensor, h: Tensor, ids: Tensor) -> Tensor:
    q, k = F.elu(q) + 1, F.elu(k) + 1
    sums = (k.unsqueeze(-1) * v.unsqueeze(-2)).cumsum(2)
    return (q.unsqueeze(-2) @ sums).squeeze(-2) / (q * k.cumsum(2)).sum(-1, keepdim=True)


def _alibi(h: Tensor, ids: Tensor) -> Tensor:
    return (_back(h).abs().to(h) * -0.1).masked_fill(_back(h) < 0, float("-inf"))


ATTENTION: dict[str, Callable[..., Tensor]] = {
    "causal": lambda q, k, v, h, ids: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    "full": lambda q, k, v, h, ids: F.scaled_dot_product_attention(q, k, v),
    "padding": _by_mask(lambda h, ids: (ids != 0)[:, None, None, :] | (_back(h) == 0)),
    "window": _by_mask(lambda h, ids: (_back(h) >= 0) & (_back(h) < 4)),
    "prefix": _by_mask(lambda h, ids: (_back(h) >= 0) | (_positions(h)[None] < 3)),
    "alibi": _by_mask(_alibi),
    "by hand": _by_hand,
    "einsum": _by_einsum,
    "linear": _linear_attention,
    "linear causal": _linear_causal_attention,
}


def _attention(kind: str) -> Operation:
    def run(module: nn.Module, h: Tensor, ids: Tensor) -> Tensor:
        q, k, v = map(_split, module(h).chunk(3, -1))
        return h + _join(ATTENTION[kind](q, k, v, h, ids))

    # Without a bias: that of the keys has no gradient, but for rounding.
    return Operation(lambda: nn.Linear(WIDTH, 3 * WIDTH, bias=False), run)


def _added(change: Callable[[Any, Tensor, Tensor], Tensor], module: Callable[[], nn.Module] = _linear) -> Operation:
    return Operation(module, lambda m, h, ids: h + change(m, h, ids))


def _changed(change: Callable[[Tensor, Tensor], Tensor]) -> Operation:
    return Operation(nn.Identity, lambda m, h, ids: change(h, ids))


def _written(m: nn.Module, h: Tensor, ids: Tensor) -> Tensor:
    x: Tensor = m(h)
    x[:, 0] += h[:, 1]
    x[:, 2:] *= 2
    return x


def _chosen(m: nn.Module, h: Tensor, ids: Tensor) -> Tensor:
    keep, out = ids % 3 == 0, h.clone()
    out[keep] = m(h[keep])
    return out


def _recurrence(m: nn.Module, h: Tensor, ids: Tensor) -> Tensor:
    state, states = h[:, 0] * 0, []
    for token in range(h.shape[1]):
        state = 0.5 * state + m(h[:, token]).tanh()
        states.append(state)
    return torch.stack(states, 1)


def _mean_of_real(m: nn.Module, h: Tensor, ids: Tensor) -> Tensor:
    real = (ids != 0).unsqueeze(-1)
    found: Tensor = m((h * real).sum(1, keepdim=True) / real.sum(1, keepdim=True).clamp(min=1))
    return found


def _experts(m: Any, h: Tensor, ids: Tensor) -> Tensor:
    shares = m[0](h).softmax(-1).unbind(-1)
    return torch.stack([share.unsqueeze(-1) * expert(h) for share, expert in zip(shares, m[1:], strict=True)]).sum(0)


OPERATIONS: dict[str, Operation] = {
    **{f"attention {kind}": _attention(kind) for kind in ATTENTION},
    "mlp": _added(lambda m, h, ids: m(h), lambda: nn.Sequential(_linear(), nn.GELU(), _linear())),
    "layer norm": Operation(lambda: nn.LayerNorm(WIDTH), lambda m, h, ids: m(h)),
    "experts": _added(_experts, lambda: nn.ModuleList([nn.Linear(WIDTH, 3), *(_linear() for _ in range(3))])),
    "shift": _added(lambda m, h, ids: m(F.pad(h[:, :-1], (0, 0, 1, 0)))),
    "shift back": _added(lambda m, h, ids: m(F.pad(h[:, 1:], (0, 0, 0, 1)))),
    "roll": _added(lambda m, h, ids: m(h.roll(2, 1))),
    "flip": _added(lambda m, h, ids: m(h.flip(1))),
    "difference": _added(lambda m, h, ids: m(torch.diff(h, dim=1, prepend=h[:, :1] * 0))),
    "running mean": _added(lambda m, h, ids: m(h.cumsum(1) / (_positions(h) + 1)[:, None])),
    "cumsum from the end": _changed(lambda h, ids: h + h.flip(1).cumsum(1).flip(1) / 10),
    "cummax": _changed(lambda h, ids: h + h.cummax(1).values),
    "logcumsumexp": _changed(lambda h, ids: h + h.logcumsumexp(1) / 10),
    "mean": _added(lambda m, h, ids: m(h.mean(1, keepdim=True))),
    "maximum": _added(lambda m, h, ids: m(h.amax(1, keepdim=True))),
    "mean of real tokens": _added(_mean_of_real),
    "pooled by weights": _added(lambda m, h, ids: (m(h).softmax(1) * h).sum(1, keepdim=True)),
    "top 3": _added(lambda m, h, ids: m(h.topk(3, 1).values.mean(1, keepdim=True))),
    "sorted": _added(lambda m, h, ids: m(h.sort(1).values)),
    "first": _added(lambda m, h, ids: m(h[:, :1])),
    "last": _added(lambda m, h, ids: m(h[:, -1:])),
    "last real": _added(lambda m, h, ids: m(h[torch.arange(len(h)), (ids != 0).sum(1) - 1])[:, None]),
    "largest id": _added(lambda m, h, ids: m(h[torch.arange(len(h)), ids.argmax(1)])[:, None]),
    "gather": _added(lambda m, h, ids: m(h.gather(1, (ids % h.shape[1]).unsqueeze(-1).expand_as(h)))),
    "every other": _added(lambda m, h, ids: m(h[:, ::2]).repeat_interleave(2, 1)[:, : h.shape[1]]),
    "thirds": _added(lambda m, h, ids: torch.cat([c.mean(1, keepdim=True).expand_as(c) for c in m(h).chunk(3, 1)], 1)),
    "class token": Operation(
        lambda: nn.Embedding(1, WIDTH),
        lambda m, h, ids: torch.cat([m.weight.expand(len(h), 1, WIDTH), h], 1)[:, 1:] + m.weight[0],
    ),
    "causal convolution": _added(
        lambda m, h, ids: m(h.mT)[..., : h.shape[1]].mT, lambda: nn.Conv1d(WIDTH, WIDTH, 3, padding=2, groups=WIDTH)
    ),
    "convolution": _added(lambda m, h, ids: m(h.mT).mT, lambda: nn.Conv1d(WIDTH, WIDTH, 5, padding=2)),
    "average pool": _added(lambda m, h, ids: m(F.avg_pool1d(h.mT, 3, 1, 1).mT)),
    "unfold": _added(lambda m, h, ids: m(F.pad(h, (0, 0, 2, 0)).unfold(1, 3, 1).mean(-1))),
    "gru": _added(lambda m, h, ids: m(h)[0], lambda: nn.GRU(WIDTH, WIDTH, batch_first=True)),
    "recurrence": _added(_recurrence),
    "positions": _added(lambda m, h, ids: m(_positions(h)), lambda: nn.Embedding(MAX_TOKENS, WIDTH)),
    "counted positions": _added(
        lambda m, h, ids: m((ids != 7).long().cumsum(1)), lambda: nn.Embedding(MAX_TOKENS, WIDTH)
    ),
    "sinus": _changed(lambda h, ids: h + torch.sin(_positions(h).to(h)[:, None] / torch.arange(1, WIDTH + 1))),
    "relative positions": _added(
        lambda m, h, ids: torch.softmax(m(_back(h).abs()).squeeze(-1), -1) @ h, lambda: nn.Embedding(MAX_TOKENS, 1)
    ),
    "gate by ids": _changed(lambda h, ids: h * (1 + (ids % 2).unsqueeze(-1))),
    "number of ids": _changed(lambda h, ids: h * (1 + (ids > 20).sum(1)[:, None, None] / 10)),
    "one hot": _changed(lambda h, ids: h + F.one_hot(ids % WIDTH, WIDTH).to(h)),
    "where": Operation(_linear, lambda m, h, ids: torch.where((ids > 30).unsqueeze(-1), m(h), h)),
    "masked": _added(lambda m, h, ids: m(h.masked_fill((ids < 12).unsqueeze(-1), 0.0))),
    "chosen rows": _added(_chosen),
    "written in place": _added(_written),
    "flat rows": _added(lambda m, h, ids: m(h.reshape(-1, WIDTH)).view_as(h)),
    "normed along tokens": _changed(lambda h, ids: h / (1 + h.norm(dim=1, keepdim=True))),
    "normed over all": _changed(lambda h, ids: (h - h.mean((0, 1))) / (h.std((0, 1)) + 1)),
    "scaled by all": _changed(lambda h, ids: h * (1 + h.abs().mean())),
    "scaled by length": _changed(lambda h, ids: h * math.log(h.shape[1])),
    "beside the first": _changed(lambda h, ids: h * (1 + F.cosine_similarity(h[:, :1], h, dim=-1).unsqueeze(-1))),
    "products of tokens": _added(lambda m, h, ids: torch.bmm(torch.bmm(m(h), h.mT).tanh(), h) / h.shape[1]),
    "sums by id": _added(
        lambda m, h, ids: (
            h.new_zeros(len(h), 4, WIDTH).scatter_add(1, (ids % 4).unsqueeze(-1).expand_as(h), m(h)).mean(1, True) / 4
        )
    ),
}
