"""What the graph of a loss says of its terms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_sp.loss.own_terms import is_empty, own_terms

GROUP: Any = object()
X = torch.arange(1.0, 13.0, dtype=torch.float64).view(3, 4)
MASK = X > 4.5  # 8 of 12


def _counts(loss: Tensor) -> list[float]:
    return sorted(round(float(each.count(loss)), 6) for each in own_terms(loss, 3, GROUP))


@pytest.mark.parametrize(
    ("loss", "counts"),
    [
        (lambda x: (x * MASK).sum() / MASK.sum(), [8]),
        (lambda x: 0.5 * (x * MASK).sum() * (1 / MASK.sum().item()), [16]),
        (lambda x: x[MASK].mean() - F.mse_loss(x[:2], X[1:]) / 2, [-16, 8]),
        (lambda x: torch.stack([x.sum() / 3, x.mean()]).mean(), [6, 24]),
        (lambda x: sum([x[0].sum(), x[1].sum()]) / 2, [2, 2]),
        (lambda x: 1 - x.sum() / 4, [-4]),
        (lambda x: x.mean().sqrt(), [3]),  # of something else: by rows
        (lambda x: x.mean() * x.sum(), [3]),
        (lambda x: x.sum() * 0.0, [0]),
        (lambda x: x.sum() / torch.zeros(()), [0]),
    ],
)
def test_what_each_term_counts_by(loss, counts):
    assert _counts(loss(X.clone().requires_grad_())) == pytest.approx(counts)


def test_what_cannot_be_read_is_no_guess():
    x = X.clone().requires_grad_()
    within = checkpoint(lambda x: (x * MASK).sum() / MASK.sum(), x, use_reentrant=False)
    assert own_terms(within, 3, GROUP) is None
    within.backward()  # as if nobody had looked
    assert own_terms(sum(x.sum() / n for n in range(1, 99)), 3, GROUP) is None


@pytest.mark.parametrize(
    "total",
    [
        lambda x, m: (x * m).sum(),
        lambda x, m: x.masked_fill(~m, 0).sum(1).sum(),
        lambda x, m: torch.where(m, x, 0.0).sum(),
        lambda x, m: torch.where(~m, 0.0, x).view(-1).sum(),
        lambda x, m: F.cross_entropy(x, torch.where(m[:, 0], 1, -100), reduction="none").sum(),
    ],
)
def test_a_sum_over_nothing_is_known(total):
    x = X.clone().requires_grad_()
    for mask in (torch.zeros_like(MASK), MASK):
        loss = total(x, mask) / mask.sum().clamp(min=1)
        [term] = own_terms(loss, 3, GROUP)
        assert bool(is_empty(term, loss)) != bool(mask.any())
        assert bool(term.is_divided_by_one(loss)) != bool(mask.any())
