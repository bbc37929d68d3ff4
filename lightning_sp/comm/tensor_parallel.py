"""What the ranks that split the weights of a layer say to each other, each forward beside its mirror.

    copy_to_ranks       x -> x                          mirror: the sum of the ranks' gradients
    sum_of_ranks        parts of a sum -> the sum       mirror: the gradient, which all ranks have
    gather_parts        parts -> the whole              mirror: this rank's part of the gradient, which all ranks have
    own_part            the whole -> this rank's part   mirror: the whole gradient, gathered
    to_parts            rows in order -> a rank's rows of each part
    from_parts          its mirror: a rank's rows of each part -> rows in order

Legend of the last two, of q, k and v in one weight on two ranks: each has half of the rows, and needs half of each part.

    in order        rank 0: q0 q1        rank 1: k0 k1 v0 v1
    of each part    rank 0: q0 k0 v0     rank 1: q1 k1 v1

Not `sum_over_ranks`: there each rank goes on with tokens of its own, here all of them with the same ones, and with one loss.
Source: Megatron-LM, arXiv:1909.08053, section 3: f is `copy_to_ranks`, g is `sum_of_ranks`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from lightning_sp.comm.collectives import exchange, gather, reduce_sum
from lightning_sp.comm.groups import rank_in, size_of


class _CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return reduce_sum(grad_outputs[0].contiguous(), ctx.group), None


class _SumOfRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        return reduce_sum(tensor.contiguous(), group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return grad_outputs[0], None


class _GatherParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return torch.cat(gather(tensor, group), dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        return _part(grad_outputs[0], ctx.dim, ctx.group), None, None


class _OwnPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _part(tensor, dim, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        return torch.cat(gather(grad_outputs[0], ctx.group), ctx.dim), None, None


def copy_to_ranks(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Return a tensor that all ranks have, for each to go on with its part of a layer. Communicates: in the backward one all_reduce."""
    copied: Tensor = _CopyToRanks.apply(tensor, group)  # type: ignore[no-untyped-call]
    return copied


def sum_of_ranks(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Return the sum of the ranks' tensors, with which all go on alike. Communicates: one all_reduce."""
    total: Tensor = _SumOfRanks.apply(tensor, group)  # type: ignore[no-untyped-call]
    return total


def gather_parts(tensor: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Return the ranks' equally shaped parts along a dim as one tensor, with which all go on alike. Communicates: one all_gather."""
    whole: Tensor = _GatherParts.apply(tensor, dim, group)  # type: ignore[no-untyped-call]
    return whole


def own_part(tensor: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Return this rank's part along a dim of a tensor that all ranks have. Communicates: in the backward one all_gather."""
    part: Tensor = _OwnPart.apply(tensor, dim, group)  # type: ignore[no-untyped-call]
    return part


def to_parts(tensor: Tensor, dim: int, parts: Sequence[int], group: ProcessGroup) -> Tensor:
    """Return this rank's share of each part of a tensor of which each rank has a share in order. No gradient: see `from_parts`.

    Args:
        tensor: this rank's rows, those after the ones of the rank before.
        dim: along which they are rows.
        parts: rows of each part, in order; each is a multiple of the group's size.
        group: the ranks.

    Shapes: (..., n, ...) -> (..., n, ...). Communicates: one all_to_all, of up to the tensor's bytes.
    """
    size, rank = size_of(group), rank_in(group)
    rows = tensor.movedim(dim, 0)
    runs = _runs(parts, size)
    sent = [[run for run in runs if (run.owner, run.user) == (rank, user)] for user in range(size)]
    received = [sum(run.rows for run in runs if (run.owner, run.user) == (owner, rank)) for owner in range(size)]
    first, width = rank * len(rows), rows[0].numel()
    buffer = torch.cat([rows.narrow(0, run.start - first, run.rows) for of_rank in sent for run in of_rank])
    counts = [sum(run.rows for run in of_rank) * width for of_rank in sent]
    # What comes from each rank stands before what comes from the next: a rank's rows of a part are in order, and so are the parts.
    arrived = exchange(buffer.flatten(), counts, [each * width for each in received], group)
    return arrived.view(rows.shape).movedim(0, dim)


def from_parts(tensor: Tensor, dim: int, parts: Sequence[int], group: ProcessGroup) -> Tensor:
    """Return what `to_parts` was given. Shapes, arguments and bytes are those of it."""
    size, rank = size_of(group), rank_in(group)
    rows = tensor.movedim(dim, 0)
    runs = _runs(parts, size)
    received = [run for user in range(size) for run in runs if (run.owner, run.user) == (rank, user)]
    width = rows[0].numel()
    counts = [sum(run.rows for run in runs if (run.owner, run.user) == (owner, rank)) * width for owner in range(size)]
    from_ranks = [sum(run.rows for run in received if run.user == user) * width for user in range(size)]
    arrived = exchange(rows.flatten(), counts, from_ranks, group).view(rows.shape)
    pieces = dict(
        zip((run.start for run in received), torch.split(arrived, [run.rows for run in received]), strict=True)
    )
    return torch.cat([pieces[start] for start in sorted(pieces)]).movedim(0, dim)


class _Run(NamedTuple):
    """Rows one after another that one rank has, in order, and one rank uses, of a part."""

    start: int
    rows: int
    owner: int
    user: int


def _runs(parts: Sequence[int], size: int) -> list[_Run]:
    """Return the runs of all rows, in order."""
    share = sum(parts) // size
    runs, first = [], 0
    for rows in parts:
        for user in range(size):
            start, end = first + user * rows // size, first + (user + 1) * rows // size
            while start < end:
                upto = min(end, (start // share + 1) * share)
                runs.append(_Run(start, upto - start, start // share, user))
                start = upto
        first += rows
    return runs


def _part(tensor: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    return tensor.chunk(size_of(group), dim)[rank_in(group)].contiguous()
