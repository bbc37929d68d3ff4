"""What users write into tokens that they took out of a sequence, and what they see of them once the sequence was written to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.global_view.whole import Case, E, Whole

VIEW_CASES: dict[str, Case] = {}


def case(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Any:
        y = F.linear(x, w.weight)
        found = function(y, x, ids, mask, w)
        return y if found is None else (y, found)

    VIEW_CASES[function.__name__.replace("_", " ")] = run
    return function


@case
def added_in_place(y: Tensor, x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Any:
    """Single tokens, slices, every second one, of one row, of some features, with dims exchanged or joined."""
    y[:, 0] += w.rows
    y[:, 2:5] *= 2
    y[:, 1:] -= x[:, :-1]
    y[:, ::2] *= -1
    y[0, 3] += w.rows[0]
    y[1, 1:4] += 1.0
    y[:, 0, :2] += 1
    y.mT[:, :, 2] += 1.0
    y.mT[..., 1:] += 1.0
    y[:, None, 2] += 1.0
    y[:, torch.arange(y.shape[1]) % 2 == 0] *= 3
    y.flatten(0, 1)[3].mul_(2)
    y.flatten(0, 1)[3:9].mul_(2)
    y.view(-1, E)[4] = 1.0


@case
def written_by_methods(y: Tensor, x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Any:
    y[:, 0].add_(w.rows)
    y.select(1, 1).copy_(w.rows)
    y.narrow(1, 2, 3).mul_(3)
    y[:, 3:6].transpose(1, 2)[:, 0].mul_(2)
    y[:, 1:].masked_fill_(mask[:, 1:, None] == 0, 0.5)
    for t in range(1, 4):
        y[:, t] += y[:, t - 1] * 0.5
    F.relu(y[:, 5:], inplace=True)


@case
def tokens_written_in_a_list(y: Tensor, x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Any:
    y[:, 4].add_(w.rows)
    torch._foreach_mul_([y[:, 0], y[:, 3]], 3.0)


@case
def views_of_views(y: Tensor, x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Any:
    first, other = y[:, 1:], y[:, 2:6]
    inner = first[:, 2:5]
    inner += 1
    other *= 2
    first[:, 2] += w.rows
    return first * 1, other * 1, inner * 1


@case
def seen_after_writes(y: Tensor, x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Any:
    """On one device a slice is a view: it shows what was written to the sequence since."""
    token, behind, ahead, turned = y[:, 0], y[:, 1:], y[:, :4], y[:, 1:].transpose(1, 2)
    wide, windows = y[:, :1].expand(-1, 5, -1), y.unfold(1, 3, 1)
    y.mul_(2)
    y[:, 0] = 5.0
    return token * 1, behind * 1, ahead * 1, turned * 1, wide * 1, windows * 1


@case
def ids_and_masks(y: Tensor, x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Any:
    i, m = ids.clone(), mask.bool().clone()
    i[:, 0] += 1
    i[:, 1:] += 1
    m[:, :3] &= False
    means = y.detach().mean(-1)
    later = means[:, 1:]
    means.zero_()
    return F.embedding(i % 11, w.table) * m[..., None], later * 1


@case
def without_a_graph(y: Tensor, x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Any:
    with torch.no_grad():
        y[:, 0] += 1
        y[:, 1:3] *= 2
        first, _ = y.chunk(2, 1)
        first.mul_(2)
        for token in y.unbind(1)[:2]:
            token.mul_(2)
    with torch.inference_mode():
        z = y.detach() * 1
        later = z[:, 1:]
        z.mul_(2)
        (later * 1).sum(1)


@case
def diagonals_written(y: Tensor, x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Any:
    pairs = (y @ y.mT).relu() * 1
    pairs.diagonal(dim1=1, dim2=2).mul_(3)
    square = y[:, :E] * 1
    square.diagonal(dim1=1, dim2=2).fill_(3)
    numbers = y.detach()[..., 0] * 1
    numbers.diagonal().fill_(1)
    return pairs * 1, square * 1, numbers * 1


@case
def made_and_stored(y: Tensor, x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Any:
    """In place, by functions whose rules make something new; and into tensors that are given."""
    z, sums = y.detach() * 1, torch.zeros(2, E, dtype=y.dtype)
    z.cumsum_(1)
    y.baddbmm_(x, w.weight.expand(2, E, E))
    torch.sum(x.detach(), 1, out=sums)
    product = torch.empty_like(z)
    torch.matmul(z, w.weight.detach(), out=product)
    ordered = x.sort(1).values.mul_(2)
    return z * 1, sums, product, ordered, F.linear(x, w.head).mul_(2).add_(1)


@case
def rows_of_a_whole_tensor(y: Tensor, x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Any:
    """A tensor that the user has made is whole; what is written into it is too."""
    flat = y.flatten(0, 1)
    joined = flat.new_empty(len(flat), E)
    joined[:, :4], joined[:, 4:] = flat[:, 4:] * 2, flat[:, :4].sin()
    first, second = (torch.zeros(2, y.shape[1], E, dtype=y.dtype) for _ in range(2))
    first[:, 1:] = y[:, :-1]
    first += y.sin()
    second.copy_(y)
    state = torch.zeros_like(y[:, 0])
    out = torch.zeros_like(y)
    for t in range(y.shape[1]):
        state = state * 0.5 + y[:, t]
        out[:, t] = state
    return out, first, second, joined


@case
def asked_of_autograd(y: Tensor, x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Any:
    """What autograd is told of a token that was taken: a hook of its gradient, and a leaf made of its numbers."""
    token, leaf = y[:, 0], y[:, 2].detach().requires_grad_()
    token.register_hook(lambda gradient: gradient * 3)
    (gradient,) = torch.autograd.grad((leaf.square() * w.rows).sum(), leaf, create_graph=True)
    assert token.requires_grad
    assert leaf.is_leaf
    assert not token.is_leaf
    return token.square(), gradient * w.rows
