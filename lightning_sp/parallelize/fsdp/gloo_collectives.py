"""FSDP2's all-gather and reduce-scatter on gloo, straight from rank to rank: FSDP2's own hooks around `comm`'s all-pairs collectives.

Owns what FSDP2 asks of a collective (memory, reduce operations, the asynchronous handle), not the transport.

    default    gather: passed on n-1 times round a ring       reduce: all_reduce of every part, n-1 of n thrown away
    all pairs  gather: one message from each to each          reduce: one message from each to each, summed there in rank order
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

# What the public set_custom_all_gather and set_custom_reduce_scatter take has no public name.
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from lightning_sp import comm
from lightning_sp.comm.cpu.all_pairs import AllPairs, all_pairs_all_gather, all_pairs_reduce_scatter
from lightning_sp.errors import SequenceParallelError


class AllPairsAllGather(AllGather):
    """FSDP2's all-gather of a unit's parameters."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a buffer for FSDP2 to fill or to receive in."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Fill `output_tensor` (ranks * n,) with every rank's `input_tensor` (n,); return a handle to wait for if `async_op`.

        Communicates: (group size - 1) x the input's bytes leave this rank.
        """
        return _finished(all_pairs_all_gather(output_tensor, input_tensor, group), async_op)


class AllPairsReduceScatter(ReduceScatter):
    """FSDP2's reduce-scatter of a unit's gradients, summed in rank order."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a buffer for FSDP2 to fill or to receive in."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        """Fill `output_tensor` (n,) with the sum or average of this rank's part of every rank's `input_tensor` (ranks * n,).

        Communicates: (group size - 1) x the output's bytes leave this rank.

        Raises:
            SequenceParallelError: an operation that FSDP2 asks for after `set_gradient_divide_factor`, and that gloo lacks too.
        """
        size = dist.get_world_size(group)
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise SequenceParallelError(
                f"FSDP asks to reduce gradients over {size} ranks by {op}: gloo sums and averages only; beside set_gradient_divide_factor "
                "call set_force_sum_reduction_for_comms(True), or leave the factor out: the strategy's loss fits FSDP's average"
            )
        divisor = size if op == dist.ReduceOp.AVG else 1
        return _finished(all_pairs_reduce_scatter(output_tensor, input_tensor, group, divisor=divisor), async_op)


def use_all_pairs_collectives(modules: Iterable[FSDPModule], mesh: DeviceMesh) -> None:
    """Give sharded modules the all-pairs collectives where their shards travel by gloo on the CPU; elsewhere leave FSDP2's own.

    Args:
        modules: each `fully_shard`ed module.
        mesh: theirs, shard or replicate x shard; only the shard axis gets them.
    """
    group = mesh.get_group(mesh.ndim - 1)
    if mesh.device_type != "cpu" or comm.size_of(group) == 1 or not comm.is_gloo_on_cpu(group):
        return
    for each in modules:
        each.set_custom_all_gather(AllPairsAllGather())
        each.set_custom_reduce_scatter(AllPairsReduceScatter())


def _finished(work: AllPairs, async_op: bool) -> dist.Work | None:
    if async_op:
        return work
    work.wait()
    return None
