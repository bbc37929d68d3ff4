"""Ranks agree: one error raised on all of them, equal values, the same batch."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_sp.comm.collectives import gather_objects
from lightning_sp.errors import SequenceParallelError


def agree(error: str | None, group: ProcessGroup | None = None) -> None:
    """Raise the same error on every rank of a group when any rank holds one. Every rank must call it.

    Communicates: one all_reduce of 8 bytes; the messages travel only when there is an error.

    Raises:
        SequenceParallelError: with the message of each rank that has one.
    """
    if not dist.is_initialized():
        if error:
            raise SequenceParallelError(error)
        return
    device = (
        torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(group) == "nccl" else torch.device("cpu")
    )
    failed = torch.tensor([1 if error else 0], dtype=torch.int64, device=device)
    dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=group)
    if not int(failed.item()):
        return
    messages = gather_objects(error, group)
    distinct: dict[str, list[int]] = {}
    for rank, message in enumerate(messages):
        if message:
            distinct.setdefault(message, []).append(rank)
    if len(distinct) == 1 and len(next(iter(distinct.values()))) == len(messages):
        raise SequenceParallelError(next(iter(distinct)))
    raise SequenceParallelError(
        "; ".join(f"rank {', '.join(map(str, ranks))}: {message}" for message, ranks in distinct.items())
    )


def all_equal(value: Tensor, group: ProcessGroup | None = None) -> bool:
    """Return whether an int64 tensor holds the same on all ranks of a group. Every rank must call it.

    Communicates: one all_reduce of twice the tensor's bytes.
    """
    if not dist.is_initialized():
        return True
    both = torch.stack([value, -value])
    dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
    return bool((both[0] == -both[1]).all().item())


class Spread:
    """How far a number of each rank of the world is from the others', in flight. Every rank must make one.

    A class because it has a lifetime: it is started in one step and read in the next, when the device is done with it.

    Communicates: one all_reduce of 16 bytes.
    """

    def __init__(self, value: Tensor, tolerance: float) -> None:
        self._tolerance = tolerance
        self._both = torch.stack([value, -value])
        work = dist.all_reduce(self._both, op=dist.ReduceOp.MAX, async_op=True)
        self._work, self._copied = work, None
        if value.is_cuda:
            work.wait()  # the stream waits, not the host
            self._both = self._both.to("cpu", non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def is_too_wide(self) -> bool:
        """Return whether the numbers differ by more than the tolerance, relative to the largest; the same on all ranks."""
        if self._copied is not None:
            self._copied.synchronize()
        else:
            self._work.wait()
        highest, lowest = float(self._both[0]), -float(self._both[1])
        return highest - lowest > self._tolerance * max(abs(highest), abs(lowest))


def check_same_batch(
    error: str | None, digest: int, place: tuple[int, int], turns: int, group: ProcessGroup | None = None
) -> None:
    """Raise on every rank when any rank has an error, or when ranks of one sequence hold different samples. Every rank must call it.

    Args:
        error: this rank's error, None if none.
        digest: a number that identifies this rank's whole batch.
        place: (data-parallel rank, rank within the sequence's group).
        turns: passes of the ring that this rank has begun. A rank that failed before its pass and went on is behind the others for good,
            and would take the keys of one pass for those of another.
        group: a CPU-capable group over the world.

    Communicates: one all_gather of 32 bytes a rank, on the host.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        if error:
            raise SequenceParallelError(error)
        return
    mine = torch.tensor([1 if error else 0, digest, place[0], turns], dtype=torch.int64)
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, mine, group=group)
    if any(int(row[0]) for row in rows):
        agree(error, group)
    begun: dict[int, list[int]] = {}
    for row in rows:
        begun.setdefault(int(row[2]), []).append(int(row[3]))
    for data_rank, numbers in begun.items():
        if len(set(numbers)) > 1:
            raise SequenceParallelError(
                f"the ranks of data-parallel group {data_rank} have begun {numbers} passes of ring attention: must be equally many. One of them "
                "failed or left attention out, and went on; let such an error end the run, and resume it from a checkpoint"
            )
    seen: dict[int, dict[int, list[int]]] = {}
    for rank, row in enumerate(rows):
        seen.setdefault(int(row[2]), {}).setdefault(int(row[1]), []).append(rank)
    for data_rank, digests in seen.items():
        if len(digests) > 1:
            raise SequenceParallelError(
                f"ranks {sorted(digests.values())} of data-parallel group {data_rank} share one sequence but read different samples: the loader "
                "must give all of them the same; let the strategy replace the sampler, seed it by epoch alone, or split an iterable dataset by "
                "trainer.strategy.data_parallel_rank and data_parallel_size"
            )
