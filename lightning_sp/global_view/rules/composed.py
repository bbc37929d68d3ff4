"""Functions of torch that others make up: each is written out as those, and runs by their rules."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_sp.global_view.calls.call import NO_RULE, Call, Rule, is_sequence, named
from lightning_sp.global_view.exchange.movement import as_tokens
from lightning_sp.global_view.rules.losses import reduced_by
from lightning_sp.global_view.tensors.sequence_tensor import SequenceTensor


def written_out(function: Callable[..., Any]) -> Rule:
    """Return the rule of a function that takes the arguments that torch's takes."""

    def rule(call: Call) -> Any:
        return function(*call.args, **call.kwargs)

    rule.__doc__ = function.__doc__
    return rule


def _steps(y: Tensor, x: Tensor | None, dx: float | None, dim: int) -> tuple[Tensor, int]:
    """Return the areas between neighbours, and where they lie."""
    dim %= y.dim()
    count = y.shape[dim] - 1
    pairs = (y.narrow(dim, 1, count) + y.narrow(dim, 0, count)) / 2
    if x is None:
        return pairs * (1 if dx is None else dx), dim
    if x.dim() == 1 and y.dim() > 1:
        x = x.view([-1 if i == dim else 1 for i in range(y.dim())])
    at = dim - y.dim()
    return pairs * (x.narrow(at, 1, count) - x.narrow(at, 0, count)), dim


def trapezoid(y: Tensor, x: Tensor | None = None, *, dx: float | None = None, dim: int = -1) -> Tensor:
    """Integrate by trapezoids: a shift by one token, and a sum."""
    areas, at = _steps(y, x, dx, dim)
    return areas.sum(at)


def cumulative_trapezoid(y: Tensor, x: Tensor | None = None, *, dx: float | None = None, dim: int = -1) -> Tensor:
    """Integrate by trapezoids up to each token."""
    areas, at = _steps(y, x, dx, dim)
    return areas.cumsum(at)


def cosine_embedding(call: Call) -> Any:
    """Compare vectors by their angle, by labels of 1 and -1, then reduce."""
    first, second, target = (call.argument(i, name) for i, name in enumerate(("input1", "input2", "target")))
    margin = call.argument(3, "margin", 0)
    if first.dim() != 2 or second.dim() != 2:
        return NO_RULE
    # As torch computes it.
    product, sizes = (first * second).sum(1), ((each * each).sum(1) + 1e-12 for each in (first, second))
    cosine = product / reduce(torch.mul, sizes).sqrt()
    zeros = torch.zeros_like(cosine)
    losses = torch.where(target == 1, 1 - cosine, zeros) + torch.where(
        target == -1, (cosine - margin).clamp(min=0), zeros
    )
    return reduced_by(losses, call.kwargs)


def vecdot(x: Tensor, y: Tensor, *, dim: int = -1) -> Tensor:
    """Add up the products along one dim."""
    return (x.conj() * y).sum(dim) if x.is_complex() else (x * y).sum(dim)


def inner(x: Tensor, y: Tensor) -> Tensor:
    """Add up the products of the last dims."""
    return torch.tensordot(x, y, dims=([-1], [-1])) if x.dim() and y.dim() else x * y


def at_least(dims: int) -> Rule:
    """Return the rule of what adds dims of size 1 to tensors that have fewer."""

    def one(x: Tensor) -> Tensor:
        """Add dims of size 1 to tensors that have fewer."""
        if x.dim() < 1:
            x = x.unsqueeze(0)
        if x.dim() == 1 and dims > 1:
            x = x.unsqueeze(0)
        return x.unsqueeze(-1) if x.dim() == 2 and dims > 2 else x

    def rule(call: Call) -> Any:
        given = call.args[0] if isinstance(call.args[0], (list, tuple)) else call.args
        return one(given[0]) if len(given) == 1 and given is call.args else tuple(map(one, given))

    return rule


def joined(call: Call) -> Any:
    """Join tensors along the dim that a name says."""
    given = list(call.args[0])
    if call.name == "column_stack":
        return torch.cat([each.unsqueeze(1) if each.dim() == 1 else each for each in given], 1)
    dims = {"hstack": torch.atleast_1d, "dstack": torch.atleast_3d}.get(call.name, torch.atleast_2d)
    given = [dims(each) for each in given]  # type: ignore[no-untyped-call]
    dim = {"hstack": int(given[0].dim() > 1), "dstack": 2}.get(call.name, 0)
    return torch.cat(given, dim)


def cut(call: Call) -> Any:
    """Cut along the dim that a name says."""
    x = call.args[0]
    dim = {"hsplit": int(x.dim() > 1), "vsplit": 0, "dsplit": 2}[call.name]
    split: Any = torch.tensor_split
    return split(x, *call.args[1:], **call.kwargs, dim=dim)


def rot90(x: Tensor, k: int = 1, dims: Sequence[int] = (0, 1)) -> Tensor:
    """Turn by right angles: a flip, and two dims exchanged."""
    one, other = dims
    k %= 4
    if k % 2 == 0:
        return x.flip((one, other)) if k else x.clone()
    return x.flip(other if k == 1 else one).transpose(one, other)


def shifted(call: Call) -> Any:
    """Roll by half of a dim."""
    x, dim = call.args[0], call.argument(1, "dim")
    dims = list(range(x.dim())) if dim is None else [dim] if isinstance(dim, int) else list(dim)
    sign = -1 if call.name.startswith("fft_if") else 1
    for each in dims:
        size = x.shape[each]
        x = torch.roll(x, size // 2 if sign == 1 else (size + 1) // 2, each)
    return x


def select_scatter(x: Tensor, src: Tensor, dim: int, index: int) -> Tensor:
    """Put a slice in its place, in a copy."""
    y = x.clone()
    y.select(dim, index).copy_(src)
    return y


def slice_scatter(
    x: Tensor, src: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Tensor:
    """Put some tokens in their places, in a copy."""
    y = x.clone()
    y[(*[slice(None)] * (dim % x.dim()), slice(start, end, step))] = src
    return y


def diagonal_scatter(x: Tensor, src: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    """Put a diagonal in its place, in a copy."""
    y = x.clone()
    y.diagonal(offset, dim1, dim2).copy_(src)
    return y


def fill_diagonal(x: Tensor, value: float, wrap: bool = False) -> Tensor:
    """Fill a diagonal, in place."""
    x.diagonal().fill_(value)
    return x


def matrix_norm(call: Call) -> Any:
    """Return a norm of matrices: of all their numbers, or the largest sum of a row or a column."""
    x, order, dims = (
        call.argument(i, name, none) for i, (name, none) in enumerate((("A", None), ("ord", "fro"), ("dim", (-2, -1))))
    )
    keeps = bool(call.argument(3, "keepdim", False))
    rows, columns = (each % x.dim() for each in dims)
    if order in ("fro", None):
        return torch.linalg.vector_norm(x, 2, (rows, columns), keeps)
    if order not in (1, -1, math.inf, -math.inf):
        return NO_RULE
    summed, other = (rows, columns) if abs(order) == 1 else (columns, rows)
    sums = x.abs().sum(summed, keepdim=True)
    found = sums.amax(other, keepdim=True) if order > 0 else sums.amin(other, keepdim=True)
    return found if keeps else found.squeeze((rows, columns))


def renorm(x: Tensor, p: float, dim: int, maxnorm: float) -> Tensor:
    """Scale what is longer than a norm, each along one dim by itself."""
    others = [each for each in range(x.dim()) if each != dim % x.dim()]
    size = torch.linalg.vector_norm(x, p, others, keepdim=True)
    return x * torch.where(size > maxnorm, maxnorm / (size + 1e-7), torch.ones_like(size))


def channel_shuffle(x: Tensor, groups: int) -> Tensor:
    """Exchange channels between groups."""
    return x.view(x.shape[0], groups, -1, *x.shape[2:]).transpose(1, 2).flatten(1, 2)


def addmv(added: Tensor, matrix: Tensor, vector: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """Return beta * input + alpha * (matrix @ vector)."""
    return _added(added, matrix @ vector, beta, alpha)


def addmm(added: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """Return beta * input + alpha * (a @ b)."""
    return _added(added, a @ b, beta, alpha)


def addbmm(added: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """Return beta * input + alpha * (the sum of a @ b over the batch)."""
    return _added(added, (a @ b).sum(0), beta, alpha)


def _added(added: Tensor, product: Tensor, beta: float, alpha: float) -> Tensor:
    product = product if alpha == 1 else product * alpha
    return product if not beta else product + (added if beta == 1 else added * beta)


def multi_dot(call: Call) -> Any:
    """Multiply matrices one after the other."""
    given = call.args[0] if isinstance(call.args[0], (list, tuple)) else call.args
    return reduce(torch.matmul, given)


def equal(x: Tensor, y: Tensor) -> bool:
    """Return whether all numbers are the same."""
    return x.shape == y.shape and bool((x == y).all())


def allclose(call: Call) -> Any:
    """Return whether all numbers are close."""
    return bool(torch.isclose(*call.args, **call.kwargs).all())


def feature_dropout(call: Call) -> Any:
    """Drop whole channels: one number is drawn for each, alike on all ranks where it holds for the whole sequence."""
    x, p, training = (
        call.argument(i, name, none) for i, (name, none) in enumerate((("input", None), ("p", 0.5), ("train", True)))
    )
    if not training or p == 0:
        return x * 1
    if not is_sequence(x) or x.placement.dim < 2:
        return NO_RULE
    shape = [*x.shape[:2], *[1] * (x.dim() - 2)]
    kept = torch.empty(shape, dtype=x.dtype, device=x.device).bernoulli_(1 - p)
    return x * kept.div_(1 - p)


def norm_of_none(call: Call) -> Any:
    """Count what is not 0, as the norm of order 0."""
    x, order, dim = (
        call.argument(i, name, none) for i, (name, none) in enumerate((("x", None), ("ord", 2), ("dim", None)))
    )
    if order != 0:
        return NO_RULE
    dims = tuple(range(x.dim())) if dim is None else dim
    return (x != 0).sum(dims, keepdim=bool(call.argument(3, "keepdim", False))).to(x.dtype)


def sorted_first(x: Tensor) -> Any:
    """Sort along the first dim."""
    return x.sort(dim=0)[0]


def turned(call: Call) -> Any:
    """Flip the first or the second dim."""
    return call.args[0].flip(1 if call.name == "fliplr" else 0)


def ravel(x: Tensor) -> Tensor:
    """Join all dims."""
    return x.reshape(-1)


def adjoint(x: Tensor) -> Tensor:
    """Exchange the last two dims, of the conjugate."""
    return x.mT.conj() if x.is_complex() else x.mT


def mv(matrix: Tensor, vec: Tensor) -> Tensor:
    """Multiply a matrix and a vector."""
    return matrix @ vec


def trace(x: Tensor) -> Tensor:
    """Add up the diagonal."""
    return x.diagonal().sum()


def kron(x: Tensor, y: Tensor) -> Tensor:
    """Multiply each number by a whole block."""
    if x.dim() < y.dim():
        x = x[(None,) * (y.dim() - x.dim())]
    y = y[(None,) * (x.dim() - y.dim())]
    product = (
        x[tuple(each for _ in range(x.dim()) for each in (slice(None), None))]
        * (y[tuple(each for _ in range(y.dim()) for each in (None, slice(None)))])
    )
    for dim in range(x.dim()):
        product = product.flatten(dim, dim + 1)
    return product


def block_diag(call: Call) -> Any:
    """Put matrices behind each other, each right of the one before."""
    given = [torch.atleast_2d(each) for each in call.args]  # type: ignore[no-untyped-call]
    widths = [each.shape[1] for each in given]
    ahead = [sum(widths[:i]) for i in range(len(widths))]
    return torch.cat(
        [F.pad(x, (before, sum(widths) - before - x.shape[1])) for x, before in zip(given, ahead, strict=True)]
    )


def pair_distances(x: Tensor, p: float = 2.0) -> Tensor:
    """Return the distance of each row to each later one."""
    first, second = torch.triu_indices(len(x), len(x), 1, device=x.device).unbind(0)
    return torch.cdist(x, x, p)[first, second]


def constant_pad(x: Tensor, pad: Sequence[int], value: float = 0) -> Tensor:
    """Pad with one value."""
    return F.pad(x, list(pad), value=value)


def take(x: Tensor, index: Tensor) -> Any:
    """Take numbers by their place among all."""
    flat = x.reshape(-1)
    return (as_tokens(flat) if isinstance(flat, SequenceTensor) else flat)[index]


RULES: dict[str, Rule] = {
    **named("trapezoid trapz", written_out(trapezoid)),
    **named("cumulative_trapezoid", written_out(cumulative_trapezoid)),
    **named("cosine_embedding_loss", cosine_embedding),
    **named("vecdot", written_out(vecdot)),
    **named("inner", written_out(inner)),
    "atleast_1d": at_least(1), "atleast_2d": at_least(2), "atleast_3d": at_least(3),
    **named("hstack vstack row_stack dstack column_stack", joined),
    **named("hsplit vsplit dsplit", cut),
    **named("rot90", written_out(rot90)),
    **named("fft_fftshift fft_ifftshift", shifted),
    **named("select_scatter", written_out(select_scatter)),
    **named("slice_scatter", written_out(slice_scatter)),
    **named("diagonal_scatter", written_out(diagonal_scatter)),
    **named("fill_diagonal", written_out(fill_diagonal)),
    **named("matrix_norm", matrix_norm),
    **named("vector_norm", norm_of_none),
    **named("renorm", written_out(renorm)),
    **named("channel_shuffle", written_out(channel_shuffle)),
    **named("addmv", written_out(addmv)),
    **named("addmm", written_out(addmm)),
    **named("addbmm", written_out(addbmm)),
    **named("multi_dot chain_matmul", multi_dot),
    **named("equal", written_out(equal)),
    **named("allclose", allclose),
    **named("feature_dropout", feature_dropout),
    **named("msort", written_out(sorted_first)),
    **named("take", written_out(take)),
    **named("fliplr flipud", turned),
    **named("ravel", written_out(ravel)),
    **named("adjoint mH H", written_out(adjoint)),
    **named("mv", written_out(mv)),
    **named("trace", written_out(trace)),
    **named("kron", written_out(kron)),
    **named("block_diag", block_diag),
    **named("pdist", written_out(pair_distances)),
    **named("constant_pad_nd", written_out(constant_pad)),
}  # fmt: skip
