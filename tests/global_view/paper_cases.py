"""Parts of models that are known by their papers, as their code has them: the table of rules carries each."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.global_view import keyword_cases  # noqa: F401
from tests.global_view.user_cases import case
from tests.global_view.whole import E
from tests.global_view.written_cases import WRITTEN_CASES

PAPER_CASES = WRITTEN_CASES  # with those that follow


@case
def experts_of_a_capacity(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    """GShard: places by a cumulative sum over all rows' tokens, dispatched and combined by products with zeros and ones."""
    flat = x.reshape(-1, E)
    weight, expert = flat[:, :4].softmax(-1).max(-1)
    taken = F.one_hot(expert, 4).to(x.dtype)
    place = (taken.cumsum(0) - 1) * taken
    kept = (place < 6).to(x.dtype) * taken
    sent = kept[..., None] * F.one_hot(place.sum(-1).long().clamp(max=5), 6).to(x.dtype)[:, None]
    given = torch.einsum("nec,nd->ecd", sent, flat)
    back = torch.einsum("nec,ecd->nd", sent * weight[:, None, None], given.tanh())
    return given, back.view(x.shape)


@case
def convolved_features(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    """Tokens as channels, mixed by a convolution of width 1: gMLP's gate."""
    s = x.shape[1]
    w = torch.linspace(-1, 1, s * s, dtype=x.dtype).view(s, s, 1)
    return F.conv1d(x, w, x[0, :, 0]), F.conv1d(x, w[:5]), x * F.conv1d(x, w, padding="same")


@case
def neighbours_by_number(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    """DGCNN: the nearest tokens of each, taken by their number among all rows' tokens."""
    b, s, _ = x.shape
    near = torch.cdist(x, x).topk(3, dim=-1, largest=False).indices + torch.arange(b)[:, None, None] * s
    beside = x.reshape(-1, E)[near.reshape(-1)].view(b, s, 3, E)
    return torch.cat([beside - x[:, :, None], x[:, :, None].expand_as(beside)], -1).tanh().max(2).values
