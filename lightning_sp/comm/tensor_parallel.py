"""What the ranks that split the weights of a layer say to each other, each forward beside its mirror.

    copy_to_ranks       x -> x                          mirror: the sum of the ranks' gradients
    sum_of_ranks        parts of a sum -> the sum       mirror: the gradient, which all ranks have
    gather_parts        parts -> the whole              mirror: this rank's part of the gradient, which all ranks have
    own_part            the whole -> this rank's part   mirror: the whole gradient, gathered

Not `sum_over_ranks`: there each rank goes on with tokens of its own, here all of them with the same ones, and with one loss.
Source: Megatron-LM, arXiv:1909.08053, section 3: f is `copy_to_ranks`, g is `sum_of_ranks`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from lightning_sp.comm.collectives import gather, reduce_sum
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


def _part(tensor: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    return tensor.chunk(size_of(group), dim)[rank_in(group)].contiguous()
