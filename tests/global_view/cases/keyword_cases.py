"""Arguments by name, and by numpy's names, as users write them; and scores that a mask or a maximum takes its dtype or numbers from."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.global_view.cases.user_cases import case
from tests.global_view.whole import E, V


def places(x: Tensor, ids: Tensor) -> Tensor:
    return ids[..., None].expand_as(x) % x.shape[1]


@case
def axis_of_a_scan(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    """`axis` is torch's own word for `dim`, too."""
    return (
        x.cumsum(axis=1), torch.cumsum(input=x, dim=1), torch.cumsum(a=x, axis=-1), mask.cumsum(axis=-1),
        (x * 0.1).cumprod(axis=1), x.sort(axis=1).values, x.flip(dims=[1]), torch.logcumsumexp(x, axis=1),
    )  # fmt: skip


@case
def axis_of_a_reduction(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    return (
        torch.sum(input=x, dim=1), torch.sum(a=x, axis=1), x.mean(axis=-1), x.amax(axis=1, keepdims=True), x.softmax(dim=1),
        torch.linalg.vector_norm(x=x, dim=1), torch.quantile(input=x, q=0.5, dim=1), torch.stack((x, x), axis=0),
    )  # fmt: skip


@case
def scattered_by_name(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    at, classes = places(x, ids), ids[..., None].expand_as(x) % 8
    into = torch.zeros(2, 8, E, dtype=x.dtype)
    return (
        torch.zeros_like(x).scatter(dim=1, index=at, src=x.detach() * 0 + 1),
        torch.zeros_like(x).scatter_(1, at, value=1.0) + x,
        torch.zeros_like(x).scatter_add(dim=1, index=at, src=x),
        into.scatter_reduce(src=x, dim=1, index=classes, reduce="amax", include_self=False),
        torch.zeros(2, 8, E, dtype=x.dtype).scatter_add_(dim=1, index=classes, src=x),
        torch.zeros(*ids.shape, V, dtype=x.dtype).scatter_(dim=-1, index=ids.unsqueeze(-1), value=1.0),
    )


@case
def factors_by_name(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    b, s, _ = x.shape
    return (
        torch.matmul(input=x, other=x.transpose(1, 2)).softmax(-1) @ x, torch.bmm(input=x.transpose(1, 2), mat2=x),
        F.linear(input=x, weight=torch.eye(E, dtype=x.dtype)), torch.tile(x, dims=(1, 1, 2)), x.repeat(repeats=(1, 1, 2)),
        torch.searchsorted(sorted_sequence=torch.tensor([1, 3]), input=ids) * x.sum(-1), torch.where(ids > 3, input=x[..., 0], other=x[..., 1]),
        torch.zeros(b * s, E, dtype=x.dtype).index_add(dim=0, index=ids.flatten() % 5, source=x.flatten(0, 1)),
    )  # fmt: skip


@case
def a_mask_of_the_dtype_of_scores(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    """The Differential Transformer's: https://github.com/microsoft/unilm/blob/master/Diff-Transformer/multihead_diffattn.py."""
    s = x.shape[1]
    scores = x @ x.transpose(1, 2) / math.sqrt(E)
    causal = torch.triu(torch.zeros([s, s]).float().fill_(float("-inf")).type_as(scores), 1)
    scores = torch.nan_to_num(scores)
    scores += causal
    low = torch.maximum(torch.tensor(torch.finfo(x.dtype).min, dtype=x.dtype), x @ x.transpose(1, 2))
    return F.softmax(scores, dim=-1) @ x, low.softmax(-1) @ x


@case
def numbers_of_a_maximum(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    """Softpick (https://arxiv.org/abs/2504.20966): the maximum of each query is more than what a softmax is shifted by."""
    s = x.shape[1]
    scores = x @ x.transpose(1, 2) * 0.02
    seen = torch.ones(s, s, dtype=torch.bool).tril()
    largest = scores.masked_fill(~seen, -1e30).amax(-1, keepdim=True)
    picked = ((scores - largest).exp() - (-largest).exp()) * seen
    before = scores.max(-1, keepdim=True).values
    scores *= 1.5
    later = (scores - before).exp()
    return picked.relu() / (picked.abs().sum(-1, keepdim=True) + 1e-8) @ x, later @ x


@case
def whole_as_a_sequence_is(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    """NEFTune's noise and the like: what is whole takes shape and dtype of a tensor of the sequence."""
    noise = torch.linspace(-1.0, 1.0, x.numel(), dtype=torch.float32)
    return x + noise.view_as(x).type_as(x), x * noise.to(x).reshape_as(x), x + torch.ones(E).to(x).expand_as(x)


@case
def ids_seen_before(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    """Unlikelihood (https://arxiv.org/abs/1908.04319): each token has a row of ids that came before it."""
    b, s, _ = x.shape
    p = F.pad(x, (0, V - E)).softmax(-1)
    before = torch.tril(ids.unsqueeze(1).expand(-1, s, -1), -1)
    hidden = torch.zeros_like(p).scatter_(2, before, 1.0)
    attended = (x @ x.transpose(1, 2)).softmax(-1)  # copied into the vocabulary: https://arxiv.org/abs/1704.04368
    copied = torch.zeros(b, s, V, dtype=x.dtype).scatter_add(2, ids.unsqueeze(1).expand(-1, s, -1), attended)
    into = torch.zeros(b, s, V, dtype=x.dtype)
    into.scatter_add_(2, ids.unsqueeze(1).repeat(1, s, 1), attended)
    return torch.log(torch.clamp(1 - p, min=1e-5)) * hidden, copied, into * p
