"""Matrices and differences that other functions make up: diagonals, covariances, gradients of what is sampled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_sp.global_view.calls.call import NO_RULE, Call, Rule, is_sequence
from lightning_sp.global_view.rules.composed import written_out


def diag_embed(x: Tensor, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Tensor:
    """Make matrices with the last dim on a diagonal."""
    shown = torch.ones(x.shape[-1], dtype=torch.bool, device=x.device).diag(offset)
    rows = F.pad(x, (0, offset) if offset > 0 else (-offset, 0)) if offset else x
    return torch.where(shown, rows.unsqueeze(-1), x.new_zeros(())).movedim((-2, -1), (dim1, dim2))


def diag(x: Tensor, diagonal: int = 0) -> Tensor:
    """Make a matrix of a row, or take the diagonal of one."""
    return diag_embed(x, diagonal) if x.dim() == 1 else x.diagonal(diagonal)


def part_of_diagonal(call: Call) -> Any:
    """Take another diagonal than the first, or that of what is no square: the first of some rows and columns."""
    x = call.args[0]
    offset, dim1, dim2 = (
        call.argument(i, n, d) for i, n, d in ((1, "offset", 0), (2, "dim1", 0), (3, "dim2", 1))
    )  # fmt: skip
    if not is_sequence(x):
        return NO_RULE
    rows, columns = dim1 % x.dim(), dim2 % x.dim()
    above, left = max(-offset, 0), max(offset, 0)
    count = min(x.shape[rows] - above, x.shape[columns] - left)
    if count < 1 or (x.shape[rows], x.shape[columns]) == (count, count):
        return NO_RULE
    return x.narrow(rows, above, count).narrow(columns, left, count).diagonal(0, rows, columns)


def covariance(call: Call) -> Any:
    """Multiply what is left of each row without its mean with that of all rows, over how many numbers there are."""
    x, correction = call.args[0], call.kwargs.get("correction", 1)
    weighed = any(call.kwargs.get(name) is not None for name in ("fweights", "aweights"))
    if weighed or not is_sequence(x) or x.dim() != 2 or x.is_complex():
        return NO_RULE
    rows = x - x.mean(1, keepdim=True)
    return rows @ rows.mT / max(x.shape[1] - correction, 0)


def correlation(call: Call) -> Any:
    """Multiply what is left of each row without its mean, in length 1, with that of all rows."""
    x = call.args[0]
    if not is_sequence(x) or x.dim() != 2 or x.is_complex():
        return NO_RULE
    rows = x - x.mean(1, keepdim=True)
    rows = rows / rows.square().sum(1, keepdim=True).sqrt()
    return (rows @ rows.mT).clamp(-1, 1)


def gradient(call: Call) -> Any:
    """Return differences of neighbours in each dim, of what is sampled at equal distances."""
    x, dims, edge = call.args[0], call.kwargs.get("dim"), call.kwargs.get("edge_order", 1)
    dims = list(range(x.dim())) if dims is None else [dims] if isinstance(dims, int) else list(dims)
    given = call.kwargs.get("spacing")
    given = 1 if given is None else given
    spacing = [given] * len(dims) if isinstance(given, (int, float)) else list(given)
    if not all(isinstance(each, (int, float)) for each in spacing):
        return NO_RULE  # of other distances
    return [_slope(x, dim % x.dim(), step, edge) for dim, step in zip(dims, spacing, strict=True)]


def _slope(x: Tensor, dim: int, step: float, edge: int) -> Tensor:
    count = x.shape[dim]
    inner = (x.narrow(dim, 2, count - 2) - x.narrow(dim, 0, count - 2)) / (2 * step)

    def at(places: Sequence[int]) -> Tensor:
        first, second = x.narrow(dim, places[0], 1), x.narrow(dim, places[1], 1)
        if edge == 1:
            return second - first
        return 2 * second - 1.5 * first - 0.5 * x.narrow(dim, places[2], 1)

    begin, end = at((0, 1, 2)), -at((count - 1, count - 2, count - 3))
    return torch.cat([begin / step, inner, end / step], dim)


def narrow_copy(x: Tensor, dim: int, start: int, length: int) -> Tensor:
    """Take some of a dim, in a copy."""
    return x.narrow(dim, start, length).clone()


RULES: dict[str, Rule] = {
    "diag_embed": written_out(diag_embed),
    "diag": written_out(diag),
    "diagonal": part_of_diagonal,
    "cov": covariance,
    "corrcoef": correlation,
    "gradient": gradient,
    "narrow_copy": written_out(narrow_copy),
}
