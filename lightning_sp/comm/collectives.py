"""Every collective of the project but those that FSDP2 calls (`cpu/all_pairs`), each with an explicit group.

Owns transport, not meaning: what a buffer contains is the caller's concern. No collective stands under `if rank`.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_sp.comm.groups import group_name, takes_host_tensors
from lightning_sp.comm.meetings.failing_together import check_peers
from lightning_sp.comm.operators import all_gather_op, all_reduce_op, all_to_all_op, is_traced
from lightning_sp.comm.pickled import pickled

# Of a picklable value: bytes that say how many there are, and bytes with which most values are done.
_LENGTH, _SHORT = 8, 2048


class Exchange:
    """An all-to-all in flight: `sent[i]` elements of a flat buffer, in order, go to rank i, and `received[i]` come from each rank i.

    It keeps the sent buffer alive until `wait`, and the received one is valid only then. The ranks of a group begin theirs in one order.

    Args:
        buffer: what is sent, flat.
        sent: elements for each rank.
        received: elements from each rank.
        group: the ranks.
        output: where they land, flat; None for new memory.

    Shapes: (sum(sent),) -> (sum(received),). Communicates: one all_to_all_single, sum(sent) - sent[own rank] elements leave this rank.
    """

    def __init__(
        self,
        buffer: Tensor,
        sent: Sequence[int],
        received: Sequence[int],
        group: ProcessGroup,
        output: Tensor | None = None,
    ) -> None:
        check_peers(group, "an all-to-all")
        self._output = buffer.new_empty(sum(received)) if output is None else output
        self._buffer: Tensor | None = buffer
        self._work = dist.all_to_all_single(
            self._output, buffer, list(received), list(sent), group=group, async_op=True
        )

    def wait(self) -> Tensor:
        """Return the received buffer, complete."""
        if self._work is not None:
            self._work.wait()
        self._work = self._buffer = None
        return self._output


def exchange(buffer: Tensor, sent: Sequence[int], received: Sequence[int], group: ProcessGroup) -> Tensor:
    """Return what an `Exchange` brings. Shapes: (sum(sent),) -> (sum(received),)."""
    if is_traced(buffer):
        traced: Tensor = all_to_all_op(buffer, list(sent), list(received), group_name(group))
        return traced
    return Exchange(buffer, sent, received, group).wait()


def gather(tensor: Tensor, group: ProcessGroup | None) -> list[Tensor]:
    """Return the equally shaped tensors of all ranks, in rank order. Any dtype: they go as bytes, for no backend supports all.

    Communicates: one all_gather, (group size - 1) x the tensor's bytes received.
    """
    if group is None or dist.get_world_size(group) == 1:
        return [tensor]
    if is_traced(tensor):
        return list(all_gather_op(tensor.detach(), dist.get_world_size(group), group_name(group)).unbind())
    check_peers(group, "an all-gather", tensor)
    sent = tensor.detach().contiguous().view(-1).view(torch.uint8)
    parts = [torch.empty_like(sent) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, sent, group=group)
    return [part.view(tensor.dtype).view(tensor.shape) for part in parts]


def gather_objects(value: Any, group: ProcessGroup | None = None) -> list[Any]:
    """Return the picklable values of all ranks, in rank order; small ones only, outside a step.

    Communicates: one all_gather of 2 KiB of each rank, and where a value of any rank is longer another one of that length. Torch's
    `all_gather_object` takes two for each value.
    """
    if not dist.is_initialized():
        return [value]
    whole = dist.group.WORLD if group is None else group
    assert whole is not None
    check_peers(group, "an all-gather of objects")
    own = pickled(value)
    own = len(own).to_bytes(_LENGTH, "little") + own
    found = _gather_bytes(own[:_SHORT], _SHORT, whole)
    ends = [_LENGTH + int.from_bytes(each[:_LENGTH], "little") for each in found]
    if max(ends) > _SHORT:
        found = _gather_bytes(own, max(ends), whole)
    return [pickle.loads(each[_LENGTH:end]) for each, end in zip(found, ends, strict=True)]


def _gather_bytes(own: bytes, size: int, group: ProcessGroup) -> list[bytes]:
    """Return so many bytes of each rank, in rank order."""
    device = torch.device("cpu") if takes_host_tensors(group) else torch.device("cuda", torch.cuda.current_device())
    sent = torch.frombuffer(bytearray(own.ljust(size, b"\0")), dtype=torch.uint8).to(device)
    parts = [torch.empty_like(sent) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, sent, group=group)
    return [part.cpu().numpy().tobytes() for part in parts]


def barrier(device: torch.device) -> None:
    """Wait for the whole world. A backend for devices alone (NCCL) needs this rank's, or it would guess one."""
    check_peers(None, "a barrier")
    whole = dist.group.WORLD
    dist.barrier(device_ids=None if whole is None or takes_host_tensors(whole) else [device.index])


def broadcast_object(value: Any, group: ProcessGroup | None, source: int = 0) -> Any:
    """Return rank `source`'s picklable value (its rank within the group) on all ranks of the group."""
    check_peers(group, "a broadcast of an object")
    box = [pickled(value) if dist.get_rank(group) == source else b""]
    dist.broadcast_object_list(box, group=group, group_src=source)
    return pickle.loads(box[0])


def broadcast(tensor: Tensor, group: ProcessGroup | None = None, source: int = 0) -> Tensor:
    """Overwrite `tensor` with that of rank `source` within the group and return it."""
    check_peers(group, "a broadcast", tensor)
    sent = tensor.detach().contiguous()
    dist.broadcast(sent, group=group, group_src=source)
    if sent.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(sent)
    return tensor


def reduce_sum(tensor: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Return the sum over a group's ranks (the world for None), not differentiable; the tensor itself without processes."""
    if not dist.is_initialized():
        return tensor
    if is_traced(tensor):
        return _all_reduced(tensor, "sum", group)
    check_peers(group, "an all-reduce", tensor)
    total = tensor.detach().clone(
        memory_format=torch.contiguous_format
    )  # ranks add up memory, of strides that may differ
    dist.all_reduce(total, group=group)
    return total


def _all_reduced(tensor: Tensor, operation: str, group: ProcessGroup | None) -> Tensor:
    whole = dist.group.WORLD if group is None else group
    assert whole is not None
    total: Tensor = all_reduce_op(tensor.detach(), operation, group_name(whole))
    return total


def largest(tensor: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Return the elementwise largest over a group's ranks (the world for None); the tensor itself without processes.

    Communicates: one all_reduce of the tensor.
    """
    if not dist.is_initialized():
        return tensor
    if is_traced(tensor):
        return _all_reduced(tensor, "max", group)
    check_peers(group, "an all-reduce for the largest", tensor)
    result = tensor.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(result, op=dist.ReduceOp.MAX, group=group)
    return result


class _SumOverRanks(torch.autograd.Function):
    """Sum over ranks whose mirror is the sum of the ranks' cotangents, which differ where each rank goes on with tokens of its own."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup | None) -> Tensor:
        ctx.group = group
        return reduce_sum(tensor, group)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        if torch.is_grad_enabled() and grad_outputs[0].requires_grad:  # of a gradient penalty
            return _eager_sum(grad_outputs[0], ctx.group), None
        return reduce_sum(grad_outputs[0], ctx.group), None


def _eager_sum(tensor: Tensor, group: ProcessGroup | None) -> Any:
    return _SumOverRanks.apply(tensor, group)  # type: ignore[no-untyped-call]


# Not for a compiler: traced by torch 2.11 it loses its gradient once lengths change, without a word.
_sum: Callable[..., Tensor] = torch.compiler.disable(_eager_sum)  # type: ignore[no-untyped-call]


def sum_over_ranks(tensor: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Return the differentiable sum over a group's ranks (the world for None).

    The gradient is that of the sum of all ranks' losses. Where these are the same number on every rank it carries the number of ranks as a
    factor, which FSDP's averaging over the same ranks undoes.

    Communicates: one all_reduce of the tensor in the forward, one in the backward.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return tensor
    total: Tensor = (_sum if torch.compiler.is_compiling() else _eager_sum)(tensor, group)
    return total


def is_summed_over(node: Any, num_ranks: int) -> bool:
    """Return whether a graph holds a sum over so many ranks.

    Args:
        node: what autograd has noted of a tensor, None for a leaf.
        num_ranks: of the sum.
    """
    seen, to_do = set(), [node]
    while to_do:
        each = to_do.pop()
        if each is None or each in seen:
            continue
        if isinstance(each, _SumOverRanks._backward_cls) and dist.get_world_size(each.group) == num_ranks:  # type: ignore[attr-defined]
            return True
        seen.add(each)
        to_do += [before for before, _ in each.next_functions]
    return False


class _GatherOverRanks(torch.autograd.Function):
    """The equally shaped tensors of all ranks; the mirror sends each rank its own part of every rank's cotangents, and adds them up."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> tuple[Tensor, ...]:
        ctx.group, ctx.shape = group, tensor.shape
        return tuple(gather(tensor, group))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        total: Tensor = _SumOfParts.apply(ctx.group, *grad_outputs)  # type: ignore[no-untyped-call]
        return total.view(ctx.shape), None


class _SumOfParts(torch.autograd.Function):
    """The sum of what all ranks have for this one, of a tensor for each rank; its mirror gives every rank the cotangents of all."""

    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, *parts: Tensor) -> Tensor:
        ctx.group, size, elements = group, len(parts), parts[0].numel()
        buffer = torch.cat([each.reshape(-1) for each in parts])
        received = exchange(buffer, [elements] * size, [elements] * size, group).view(size, elements)
        total = received.sum(0, dtype=torch.promote_types(received.dtype, torch.float32))
        return total.to(received.dtype).view(parts[0].shape)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Any, ...]:
        return (None, *_eager_gather(grad_outputs[0].contiguous(), ctx.group))


def _eager_gather(tensor: Tensor, group: ProcessGroup) -> Any:
    return _GatherOverRanks.apply(tensor, group)  # type: ignore[no-untyped-call]


_gather: Callable[..., tuple[Tensor, ...]] = torch.compiler.disable(_eager_gather)  # type: ignore[no-untyped-call]


def gather_over_ranks(tensor: Tensor, group: ProcessGroup | None) -> list[Tensor]:
    """Return the equally shaped tensors of all ranks, in rank order, differentiable: the gradient is that of the sum of all ranks' losses.

    Communicates: one all_gather as `gather` in the forward; in the backward one all_to_all of (group size - 1) x the tensor's bytes.
    """
    if group is None or dist.get_world_size(group) == 1:
        return [tensor]
    if not (torch.is_grad_enabled() and tensor.requires_grad):
        return gather(tensor, group)
    return list((_gather if torch.compiler.is_compiling() else _eager_gather)(tensor, group))
