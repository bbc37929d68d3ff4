"""A mixture of experts as users write one: a router, and experts that are told which tokens are whose."""

from __future__ import annotations

import torch
from torch import Tensor, nn

EXPERTS, CHOSEN = 4, 2


class Experts(nn.Module):
    """Weights of all experts in one parameter.

    Args:
        features: of a token.
        inner: of an expert.
        most: tokens an expert takes, as a number, or as a share of all; None for any.
    """

    def __init__(self, features: int, inner: int, most: float | None = None) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, features, inner) / features**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, inner, features) / inner**0.5)
        self.most = most

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for number in range(EXPERTS):
            token, place = torch.where(chosen == number)
            if self.most is not None:
                most = int(self.most if self.most > 1 else self.most * len(x))
                token, place = token[:most], place[:most]
            made = torch.tanh(x[token] @ self.up[number]) @ self.down[number]
            out = out.index_add(0, token, made * weights[token, place, None])
        return out


class Mixture(nn.Module):
    """A router, which notes its loads, and experts."""

    def __init__(self, experts: Experts) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(experts.up.shape[1], EXPERTS), experts
        self.loads: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        shares = self.router(tokens).softmax(-1)
        weights, chosen = shares.topk(CHOSEN)
        self.loads.append(shares.mean(0).detach())
        return self.experts(tokens, chosen, weights).view_as(x)
