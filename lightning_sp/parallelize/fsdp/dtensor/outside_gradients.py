"""The gradient of a weight that a step reads outside of its module's forward: through its shard, a sum over shards, or the whole.

The objective is the mean over ranks of their losses: what reaches a sum or the whole is averaged over all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from lightning_sp import comm

# Of a parameter of which a gradient comes behind FSDP2's.
_IS_READ = "_lightning_sp_read_outside"


def is_read_outside(parameter: Tensor) -> bool:
    """Return whether a parameter was read outside of its module's forward, so that its gradient is whole when the backward has ended."""
    return _IS_READ in vars(parameter)


def forget_reads(parameters: Iterable[Tensor]) -> None:
    """Begin a step, in which none was read."""
    for each in parameters:
        vars(each).pop(_IS_READ, None)


def sharded_tensor(local: Tensor, of: DTensorSpec) -> DTensor:
    """Return a sharded tensor of this rank's shard, without a graph."""
    made: DTensor = DTensor(local.detach(), of, requires_grad=False)  # type: ignore[no-untyped-call]
    return made


class LocalShard(torch.autograd.Function):
    """This rank's shard of a weight; the gradient waits until FSDP2 has ended the backward, on whose streams it writes to others."""

    @staticmethod
    def forward(ctx: Any, tensor: DTensor) -> Tensor:
        """Return the shard. Shapes: of the whole -> of this rank's rows."""
        ctx.tensor = tensor
        setattr(tensor, _IS_READ, True)
        local = tensor._local_tensor.detach()
        # A shard in the host's memory meets numbers of the device.
        return (
            local.to(torch.device(tensor.device_mesh.device_type, torch.cuda.current_device()))
            if _is_offloaded(tensor)
            else local
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        """Keep the gradient until FSDP2 has ended the backward."""
        tensor: DTensor = ctx.tensor
        # A copy: two weights may be given one gradient, and each is written to.
        local = grad_outputs[0].to(tensor._local_tensor.device).clone(memory_format=torch.contiguous_format)
        if not tensor.is_leaf:
            return sharded_tensor(local, tensor._spec)
        when_backward_has_ended(lambda: _add(tensor, local))
        return None


def _is_offloaded(tensor: DTensor) -> bool:
    return tensor._local_tensor.device.type == "cpu" and tensor.device_mesh.device_type == "cuda"


def when_backward_has_ended(act: Callable[[], None]) -> None:
    """Call a function behind what FSDP2 does at the end of the backward in progress."""
    queue = torch.autograd.Variable._execution_engine.queue_callback
    queue(lambda: queue(act))


@torch.no_grad()
def _add(parameter: DTensor, local: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = sharded_tensor(local, parameter._spec)
    else:
        parameter.grad._local_tensor.add_(local)  # type: ignore[attr-defined]


class SumOfTerms(torch.autograd.Function):
    """The sum of the ranks' terms; each term's gradient is the mean over all ranks of what they make of the sum."""

    @staticmethod
    def forward(ctx: Any, term: Tensor, of: DTensorSpec) -> Tensor:
        """Add the terms up. Communicates: one all_reduce of a number over the ranks of the shards."""
        total = term.detach().clone()
        for group in _sharding_groups(of.mesh, of):
            total = comm.reduce_sum(total, group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        """Average over the world. Communicates: one all_reduce of a number."""
        return comm.reduce_sum(grad_outputs[0]) / comm.size_of(comm.world()), None


class GatheredWeight(torch.autograd.Function):
    """A weight whole on every rank; the gradient is the mean over all ranks, of which each keeps its shard."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, of: DTensorSpec) -> Tensor:
        """Gather the weight. Communicates: one all_gather."""
        ctx.of = of
        return sharded_tensor(local, of).full_tensor().clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        """Average over the world, and keep the shard. Communicates: one all_reduce of the weight's size."""
        mean = comm.reduce_sum(grad_outputs[0].contiguous()) / comm.size_of(comm.world())
        of = ctx.of
        # src_data_rank=None: every rank holds the whole and keeps its part.
        return distribute_tensor(mean, of.mesh, of.placements, src_data_rank=None).to_local(), None


def _sharding_groups(mesh: DeviceMesh, of: DTensorSpec) -> list[Any]:
    return [mesh.get_group(i) for i, each in enumerate(of.placements) if not each.is_replicate()]
