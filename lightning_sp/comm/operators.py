"""Collectives as `torch.library` operators: what stands in a graph that a compiler traces, where a process group cannot.

A group goes by its name. Each has a fake implementation, shapes without data; the derivative is that of `collectives`, which calls them.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from lightning_sp.comm.groups import group_by_name


def is_traced(tensor: Tensor) -> bool:
    """Return whether a tensor has no numbers yet: a compiler traces what is done to it."""
    return isinstance(tensor, (FakeTensor, FunctionalTensor))


@torch.library.custom_op("lightning_sp::all_reduce", mutates_args=())
def all_reduce_op(tensor: Tensor, operation: str, group: str) -> Tensor:
    """Return the sum or the largest over a group's ranks. Shapes: any, the same. Communicates: one all_reduce."""
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(
        total, op=dist.ReduceOp.MAX if operation == "max" else dist.ReduceOp.SUM, group=group_by_name(group)
    )
    return total


@all_reduce_op.register_fake
def _(tensor: Tensor, operation: str, group: str) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


@torch.library.custom_op("lightning_sp::all_gather", mutates_args=())
def all_gather_op(tensor: Tensor, size: int, group: str) -> Tensor:
    """Return the tensors of all ranks, in rank order. Shapes: (...) -> (size, ...). Communicates: one all_gather, of bytes."""
    sent = tensor.contiguous().view(-1).view(torch.uint8)
    parts = [torch.empty_like(sent) for _ in range(size)]
    dist.all_gather(parts, sent, group=group_by_name(group))
    return torch.stack(parts).view(tensor.dtype).view(size, *tensor.shape)


@all_gather_op.register_fake
def _(tensor: Tensor, size: int, group: str) -> Tensor:
    return tensor.new_empty(size, *tensor.shape)


@torch.library.custom_op("lightning_sp::all_to_all", mutates_args=())
def all_to_all_op(buffer: Tensor, sent: list[int], received: list[int], group: str) -> Tensor:
    """Exchange parts of a flat buffer. Shapes: (sum(sent),) -> (sum(received),). Communicates: one all_to_all_single."""
    output = buffer.new_empty(sum(received))
    dist.all_to_all_single(output, buffer.contiguous(), received, sent, group=group_by_name(group))
    return output


@all_to_all_op.register_fake
def _(buffer: Tensor, sent: list[int], received: list[int], group: str) -> Tensor:
    return buffer.new_empty(sum(received))
