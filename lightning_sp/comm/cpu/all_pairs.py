"""All-gather and reduce-scatter by messages, straight from each rank to each other: fewer bytes and less CPU time than gloo's own.

What FSDP2 is given on a CPU (`parallelize/fsdp/gloo_collectives.py`); measured in docs/log/gloo.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_sp.comm.groups import timeout_s
from lightning_sp.comm.point_to_point import ALL_PAIRS_TAG


class AllPairs(dist.Work):
    """One message from each rank of a group to each other, in flight, and what is to be done with each as it arrives.

    A class because it has a lifetime: buffers must live, and what is received is valid only after `wait`. Torch's `Work`, since FSDP2 waits for
    nothing else.

    Args:
        sent: what goes to each rank, contiguous; this rank's own entry is ignored.
        received: where each rank's message lands, contiguous; this rank's own entry is left as it is.
        group: at least two ranks.
        arrived: called with each rank in order, its own too, once that rank's message is there.
    """

    def __init__(
        self, sent: Sequence[Tensor], received: Sequence[Tensor], group: ProcessGroup, arrived: Callable[[int], None]
    ) -> None:
        super().__init__()
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        self._size, self._arrived = size, arrived
        self._receives: dict[int, Any] = {}
        self._sends = []
        # Step i pairs each rank with the one i after it, so that not all of them send to the same one first.
        for step in range(1, size) if sent[rank].numel() else ():
            to, source = (rank + step) % size, (rank - step) % size
            receive = dist.P2POp(dist.irecv, received[source], group=group, group_peer=source, tag=ALL_PAIRS_TAG)
            send = dist.P2POp(dist.isend, sent[to], group=group, group_peer=to, tag=ALL_PAIRS_TAG)
            self._receives[source], work = dist.batch_isend_irecv([receive, send])
            self._sends.append(work)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Return when all has arrived, been taken care of and left; the world's time limit counts unless one is given."""
        # gloo's messages have the limit that their group was made with, and torch makes those of a mesh with its own of 30 minutes.
        limit = timeout or timedelta(seconds=timeout_s())
        for rank in range(self._size):
            if rank in self._receives:
                self._receives[rank].wait(limit)
            self._arrived(rank)
        for work in self._sends:
            work.wait(limit)
        self._size, self._receives, self._sends = 0, {}, []
        return True


def all_pairs_all_gather(output: Tensor, own: Tensor, group: ProcessGroup) -> AllPairs:
    """Start to fill `output` with the flat tensors of all ranks, in rank order, sent straight from each to each.

    gloo's all_gather_into_tensor passes everything on from neighbour to neighbour. `own` may be this rank's part of `output`.

    Shapes: own (n,), output (size * n,), contiguous. Communicates: (group size - 1) x own's bytes leave this rank.
    """
    size, rank, n = dist.get_world_size(group), dist.get_rank(group), own.numel()
    assert output.numel() == size * n
    parts = [output.narrow(0, each * n, n) for each in range(size)]
    if n and parts[rank].data_ptr() != own.data_ptr():
        parts[rank].copy_(own)
    return AllPairs([own] * size, parts, group, lambda _: None)


def all_pairs_reduce_scatter(output: Tensor, parts: Tensor, group: ProcessGroup, *, divisor: int = 1) -> AllPairs:
    """Start to fill `output` with the sum over the ranks of this rank's part, divided by `divisor`; parts go straight to where they are summed.

    gloo's reduce_scatter is an all_reduce of which all but one part is thrown away: twice the bytes. The sum runs in rank order, so it is
    the same in each run, and in float32 at least, rounded once.

    Shapes: parts (size * n,), output (n,), contiguous, of one floating dtype, apart in memory.
    Communicates: (group size - 1) x output's bytes leave this rank.
    """
    size, rank, n = dist.get_world_size(group), dist.get_rank(group), output.numel()
    assert parts.numel() == size * n
    assert parts.dtype == output.dtype
    assert output.is_floating_point()
    own = [parts.narrow(0, each * n, n) for each in range(size)]
    wide = torch.promote_types(output.dtype, torch.float32)
    total = output if wide == output.dtype else torch.empty_like(output, dtype=wide)
    # Rank 0's part begins the sum: where it needs no conversion it lands in the sum itself.
    landing = [
        own[each] if each == rank else output if each == 0 and total is output else torch.empty_like(output)
        for each in range(size)
    ]

    def arrived(source: int) -> None:
        if source > 0:
            total.add_(landing[source])
        elif landing[0] is not total:
            total.copy_(landing[0])
        if source == size - 1:
            if divisor != 1:
                total.div_(divisor)
            if total is not output:
                output.copy_(total)

    return AllPairs(own, landing, group, arrived)
