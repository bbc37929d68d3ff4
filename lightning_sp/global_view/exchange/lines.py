"""Whole lines of a sequence on each rank, for what goes along the sequence and does each line (a row, a feature) by itself.

    (M, s, ...), this rank's tokens of all lines   ->   (m, L, ...), all tokens of this rank's lines       m = M / ranks, rounded up

One all-to-all there and one back, as Ulysses exchanges heads: a rank has as many numbers as before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_sp import comm
from lightning_sp.global_view.exchange.movement import as_tokens
from lightning_sp.global_view.tensors.deferred import made
from lightning_sp.global_view.tensors.placement import Placement
from lightning_sp.global_view.tensors.sequence_tensor import SequenceTensor


class _Exchange(torch.autograd.Function):
    """Equal parts of numbers go to the ranks; its mirror is the same, and has one again. Shapes: (n,) -> (n,)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchanged(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _Exchange.apply(grads[0], ctx.group), None  # type: ignore[no-untyped-call]


def _exchanged(x: Tensor, group: ProcessGroup) -> Tensor:
    size = comm.size_of(group)
    counts = [x.numel() // size] * size
    return comm.exchange(x.contiguous(), counts, counts, group)


def _sent(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return what ranks send each other, of any dtype. Shapes: (ranks, ...) -> (ranks, ...)."""
    if x.dtype == torch.bool:
        return _sent(x.to(torch.uint8), group).bool()
    if x.is_complex():
        return torch.view_as_complex(_sent(torch.view_as_real(x), group))
    # What the function gives is no view: autograd lets nobody write into a view that a function gives.
    result: Tensor = _Exchange.apply(x.reshape(-1), group)  # type: ignore[no-untyped-call]
    return result.view(x.shape)


@dataclass(frozen=True, eq=False, kw_only=True)
class Lines:
    """This rank's lines of a tensor, whole along the sequence.

    Args:
        part: (m, L, ...), the lines of this rank one after the other; the last ranks' may repeat the last line, without its gradient.
        sizes: of the dims that number the lines.
        own: where the sequence was.
    """

    part: Tensor
    sizes: tuple[int, ...]
    own: Placement

    def split(self, part: Tensor) -> SequenceTensor:
        """Return a tensor of the sequence, of another length or the same. Shapes: (m, N, ...) -> (*sizes, N, ...), with the sequence before ...

        Communicates: one all_to_all, and one in the backward.
        """
        storage, length = self.own.storage.fitting(part.shape[1]), part.shape[1]
        ranks = range(storage.layout.size)
        index = torch.stack([storage.positions_of(rank) for rank in ranks]).clamp(max=length - 1).to(part.device)
        some = part.index_select(1, index.flatten())
        parts = some.view(len(part), *index.shape, *part.shape[2:]).movedim(1, 0)  # (ranks, m, s, ...)
        local = _sent(parts, storage.group).flatten(0, 1)[: math.prod(self.sizes)]
        own = Placement(storage=storage, dim=len(self.sizes), length=length)
        return SequenceTensor(local.reshape(*self.sizes, *local.shape[1:]), own)

    def whole(self, part: Tensor) -> Tensor:
        """Return what is left of each line, whole on every rank. Shapes: (m, ...) -> (*sizes, ...). Communicates: one all_gather."""
        self.own.storage.note_reduction()
        wide = part.to(torch.uint8) if part.dtype == torch.bool else part
        parts = torch.cat(comm.gather_over_ranks(wide.contiguous(), self.own.storage.group))[: math.prod(self.sizes)]
        parts = parts.bool() if part.dtype == torch.bool else parts
        return parts.reshape(*self.sizes, *parts.shape[1:])

    def of_whole(self, whole: Tensor) -> Tensor:
        """Return this rank's lines of a whole tensor. Shapes: (*sizes, ...) -> (m, ...)."""
        flat = whole.reshape(math.prod(self.sizes), *whole.shape[len(self.sizes) :])
        storage, count = self.own.storage, len(self.part)
        return _filled(flat, count * storage.layout.size).narrow(0, storage.rank * count, count)


def lines_of(x: SequenceTensor, dims: Sequence[int]) -> Lines | None:
    """Return this rank's lines; None where the sequence has no dim of its own, or there are no lines.

    Args:
        x: (..., L, ...).
        dims: that number the lines; what is left stands behind the sequence.

    Communicates: one all_to_all, and one in the backward.
    """
    x = as_tokens(x)
    own, sizes = x.placement, tuple(x.shape[dim] for dim in dims)
    if own.outer * own.inner > 1 or not math.prod(sizes):
        return None
    storage = own.storage
    first = made(x.local).movedim((*dims, own.dim), tuple(range(len(dims) + 1)))
    flat = first.reshape(math.prod(sizes), *first.shape[len(dims) :])
    size = storage.layout.size
    flat = _filled(flat, -(-len(flat) // size) * size)
    parts = _sent(flat.reshape(size, -1, *flat.shape[1:]), storage.group)  # (ranks, m, s, ...)
    whole = storage.merged(list(parts.unbind(0)), 1).narrow(1, 0, own.length)
    return Lines(part=whole, sizes=sizes, own=own)


def along_dim(x: SequenceTensor, dim: int, like: Placement | None = None) -> SequenceTensor | None:
    """Return a tensor split along another dim; None where a dim is more than its tokens.

    Args:
        x: (..., T, ...), split along one of the two dims.
        dim: the other one.
        like: which tokens each rank is to have of that; None: as of the first, of pairs of tokens.

    Communicates: one all_to_all, and one in the backward.
    """
    own, storage = x.placement, x.placement.storage
    like = (like or own).at(dim)
    if own.outer * own.inner * like.outer * like.inner > 1 or x.shape[dim] != like.length:
        return None
    local = made(x.local)
    index = [
        like.storage.positions_of(rank).clamp(max=like.length - 1).to(local.device)
        for rank in range(storage.layout.size)
    ]
    parts = _sent(torch.stack([local.index_select(dim, each) for each in index]), storage.group)
    whole = storage.merged(list(parts.unbind(0)), own.dim).narrow(own.dim, 0, own.length)
    return SequenceTensor(whole.contiguous(), replace(like, copied=None))


def _filled(flat: Tensor, count: int) -> Tensor:
    """Return lines with the last one repeated: what is computed of it is as finite as of that, and has no gradient."""
    missing = count - len(flat)
    if not missing:
        return flat
    return torch.cat([flat, flat[-1:].detach().expand(missing, *flat.shape[1:])])


def along(x: SequenceTensor, function: Callable[[Tensor], Any]) -> Any:
    """Return what a function makes of all lines, one after the other; None as `lines_of`.

    Args:
        x: (..., L, ...).
        function: (m, L) -> (m, N), or several of these; each number of it depends on its own line alone.

    Shapes: (..., L, ...) -> (..., N, ...), split.
    """
    own = x.placement
    lines = lines_of(x, [dim for dim in range(x.dim()) if dim != own.dim])
    return None if lines is None else _each(function(lines.part), lambda part: back(lines.split(part), own.dim))


def of_lines(x: SequenceTensor, function: Callable[[Tensor], Any]) -> Any:
    """Return what a function leaves of all lines, whole on every rank; None as `lines_of`.

    Args:
        x: (..., L, ...).
        function: (m, L) -> (m,) or (m, N), or several of these.

    Shapes: (..., L, ...) -> (...) or (..., N, ...).
    """
    own = x.placement
    lines = lines_of(x, [dim for dim in range(x.dim()) if dim != own.dim])
    if lines is None:
        return None

    def whole(part: Tensor) -> Tensor:
        found = lines.whole(part)
        return found.movedim(-1, own.dim) if part.dim() > 1 else found

    return _each(function(lines.part), whole)


def _each(result: Any, change: Callable[[Tensor], Any]) -> Any:
    """Return a result changed, each where there are several, in the same kind of tuple."""
    if isinstance(result, Tensor):
        return change(result)
    changed = [change(each) for each in result]
    kind = type(result)
    return kind(changed) if kind in (list, tuple) or kind.__module__ == "torch.return_types" else tuple(changed)


def back(x: SequenceTensor, dim: int) -> SequenceTensor:
    """Return a tensor with its sequence, the last dim, where it was."""
    # Contiguous, as one device's mostly is: then a view of it is one.
    return SequenceTensor(x.local.movedim(x.placement.dim, dim).contiguous(), replace(x.placement, dim=dim))
