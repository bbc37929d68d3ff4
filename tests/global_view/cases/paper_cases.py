"""Parts of models that are known by their papers, as their code has them: the table of rules carries each."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.global_view.cases import keyword_cases  # noqa: F401
from tests.global_view.cases.research_cases import RESEARCH_CASES
from tests.global_view.cases.user_cases import case
from tests.global_view.whole import E

PAPER_CASES = RESEARCH_CASES  # with those that follow


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


@case
def scanned_by_halves(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    """An associative scan of even and odd tokens, of any number of them, as S5 and assoc-scan have it."""

    def combined(a: Any, b: Any) -> Any:
        return a[0] * b[0], torch.addcmul(b[1], b[0], a[1])

    def interleaved(even: Tensor, odd: Tensor) -> Tensor:
        count = even.shape[1] + odd.shape[1]
        odd = F.pad(odd, (0, 0, 0, even.shape[1] - odd.shape[1]))
        return torch.stack([even, odd], 2).flatten(1, 2)[:, :count]

    def scanned(given: Any) -> Any:
        if given[0].shape[1] < 2:
            return given
        odd = scanned(combined([each[:, :-1:2] for each in given], [each[:, 1::2] for each in given]))
        before = [each[:, :-1] for each in odd] if given[0].shape[1] % 2 == 0 else odd
        even = combined(before, [each[:, 2::2] for each in given])
        even = [torch.cat([each[:, :1], rest], 1) for each, rest in zip(given, even, strict=True)]
        return [interleaved(*both) for both in zip(even, odd, strict=True)]

    return scanned([x.sigmoid(), x])[1]


@case
def joined_rows_and_features(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    """What goes along all rows' tokens, or along a row's tokens and features: as along any sequence."""
    rows, flat = x.flatten(0, 1), x.flatten(1)
    in_twos = x[:, :12].view(2, 6, 2, E).flatten(1, 2)
    return (
        rows.flip(0) + rows.sort(0)[0], flat.roll(3, 1), flat.diff(dim=1), flat.unfold(1, 5, 3), F.pad(flat, (1, 2)),
        F.pad(in_twos, (0, 0, 1, 2)), torch.stack([in_twos, x[:, 1:13]], -1), torch.cat([in_twos, x[:, 1:13]], -1),
        F.conv1d(flat[:, None], x.new_ones(2, 1, 3), padding=1), flat.tanh().cumprod(1), F.max_pool1d(flat[:, None], 3, 2),
    )  # fmt: skip


@case
def broadcast_in_einsum(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    """Memories of one row for all, as block-recurrent transformers begin with."""
    q = x[:, :8].view(2, 8, 4, 2).transpose(1, 2)
    return (
        torch.einsum("bhid,bjd->bhij", q, x.new_ones(1, 5, 2).cumsum(1)).softmax(-1),
        torch.einsum("bhid,bjd->bhij", q, x[:1, :, :2]),
        torch.einsum("bnd,ed->bne", x, x.new_ones(3, 1)),
    )


@case
def diagonals_and_covariances(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    """Bands of what pairs of tokens have, matrices with a diagonal, statistics of rows."""
    pairs = x @ x.sin().mT
    return (
        pairs.diagonal(1, 1, 2).sin() + pairs.diagonal(-1, 1, 2), pairs[:, :5].diagonal(2, 1, 2), torch.diag(pairs[0]),
        torch.diag_embed(x, 1), torch.diag_embed(x.mT, -2, 1, 3).cos(), torch.diag(x[0, :, 0]),
        torch.cov(x[0].mT), torch.cov(x[0], correction=0).sin(), torch.corrcoef(x[0].mT), torch.corrcoef(x[1]).sin(),
    )  # fmt: skip


@case
def slopes_and_solvers(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    """Differences of neighbours, and what else goes by whole matrices of tokens."""
    definite = x @ x.mT + 3 * torch.eye(x.shape[1], dtype=x.dtype)
    return (
        *torch.gradient(x, spacing=0.5), *torch.gradient(x, dim=1, edge_order=2), torch.narrow_copy(x.detach(), 1, 2, 5),
        torch.linalg.solve_ex(definite, x)[0], torch.linalg.inv_ex(definite)[0], torch.linalg.cholesky_ex(definite)[0],
        torch.cholesky_inverse(torch.linalg.cholesky(definite)), torch.linalg.lu_factor(definite)[0],
        torch.searchsorted(x.detach().sort(-1)[0], x.detach()),
    )  # fmt: skip
