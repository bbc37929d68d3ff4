"""What researchers write in models of their own: chunks of a state space or a delta rule, written into a tensor that was made for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.global_view.cases.user_cases import case
from tests.global_view.cases.written_cases import WRITTEN_CASES
from tests.global_view.whole import E

RESEARCH_CASES = WRITTEN_CASES  # with those that follow


@case
def delta_rule_in_as_many_chunks_as_rows(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    k = x[:, :12].reshape(2, 2, 6, E)
    state = k.new_zeros(2, E, E)
    wide = k.new_zeros(2, 1, E, E)
    out = torch.zeros_like(k)
    for i in range(2):
        new = k[:, i] - k[:, i] @ state
        out[:, i] = k[:, i] @ state + new
        state = state + k[:, i].transpose(-1, -2) @ new / 9
        wide = wide + state[:, None]
    return out.reshape(2, 12, E), state, wide


@case
def tokens_of_a_view_written_to_one_place(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    out = torch.zeros_like(x)
    out[:, 3] = x.sum(1)
    out[0, 1] = x[1].cumsum(0)[2]
    pairs = x[:, :12].unflatten(1, (2, 6))
    cube = torch.zeros_like(pairs)
    cube[1] = pairs[0] * 2
    cube[0, 1] = pairs.permute(2, 1, 0, 3)[:6, 0, 1]
    return out, cube


@case
def experts_in_order_weighed_in_place(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    flat = x.reshape(-1, E)
    weights, chosen = (flat[:, :4].softmax(-1)).topk(2, dim=-1)
    order = chosen.view(-1).argsort(stable=True)
    given = flat[order // 2]
    done = torch.cat([given[:9] * 2, given[9:] * 3])
    back = torch.empty_like(done)
    back[order] = done
    given_back = back.view(*chosen.shape, -1).mul_(weights.unsqueeze(-1)).sum(1).view(x.shape)
    return x + given_back, given_back * x


@case
def joined_rows_written_over(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    tokens = torch.cat([x[0], x[1]])
    y, z, w = x.reshape(-1, E).clone(), torch.zeros_like(tokens), tokens.clone()
    y[:] = tokens * 2
    y += tokens
    z[...] = x.flatten(0, 1)
    w[2:-2] = x.flatten(0, 1)[1:-3]
    return y, z, w


@case
def scores_written_by_an_index(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    """Token merging hides a row of them, others a triangle, a diagonal, a few by their mask."""
    S = x.shape[1]
    later = torch.ones(S, S, dtype=torch.bool).triu(1)
    found = []
    for write in (
        lambda s: s.__setitem__((Ellipsis, 0, slice(None)), -1e9),
        lambda s: s.__setitem__((slice(None), later), -torch.inf),
        lambda s: s.__setitem__(later.expand(s.shape), -torch.inf),
        lambda s: s.__setitem__((Ellipsis, torch.arange(S), torch.arange(S)), -1e9),
        lambda s: s.__setitem__((slice(None), slice(None), 0), s[:, :, 1]),
        lambda s: s.mul_(torch.arange(S)),
    ):
        scores = x @ x.mT / 3
        write(scores)
        found.append(scores.softmax(-1) @ x)
    nearest = x @ x.mT / 3
    nearest[..., 0, :] = -torch.inf
    return found, nearest.max(-1)[1], nearest.argsort(-1)


@case
def scores_written_through_a_view(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    def scores() -> Tensor:
        return x[:, None].expand(-1, 2, -1, -1) @ x[:, None].mT / 3

    v = x[:, None].expand(-1, 2, -1, -1)
    a, b, c, d, e = (scores() for _ in range(5))
    a[:, :, 0].mul_(3)
    b.diagonal(dim1=-2, dim2=-1).fill_(-1e9)
    joined = c.view(-1, *c.shape[-2:])
    joined[:, 2] = 5
    first = d[..., 0, :]
    d *= 2
    flipped = e.transpose(-1, -2)
    flipped[..., 0, :] = 9
    whole = scores()
    grouped = whole.unsqueeze(2)
    whole.mul_(2.0)
    return [s.softmax(-1) @ v for s in (a, b, c, d, e)], joined.sum(), first * 1, grouped.softmax(-1) @ v.unsqueeze(2)


@case
def weights_written_by_an_index(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    scores = x @ x.mT / 3
    weights = scores.softmax(-1)
    pruned = weights.clone()
    before = weights @ x
    pruned[:, :, 1] = 0
    return before, pruned @ x, pruned[..., 0, :].sum(), weights @ x
