"""Every collective of the project but what FSDP2 is given (`direct`), each with an explicit group.

Private or renamed torch names live here and in the kernel file alone. Owns transport, not meaning: what a buffer
holds is the caller's concern. No collective stands under `if rank`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as _c10d

from lightning_sp.errors import SequenceParallelError

_P = ParamSpec("_P")
_T = TypeVar("_T")

# gloo matches messages between two ranks by tag. One of its own for `direct.AllPairs`, for a ring's hops may be in flight on the same group;
# above it the turns of the rings, so that what a pass that was given up has left is never taken for the next one's.
ALL_PAIRS_TAG, _FIRST_TURN_TAG = 1, 2
_turns: weakref.WeakKeyDictionary[ProcessGroup, int] = weakref.WeakKeyDictionary()


def group_by_name(name: str) -> ProcessGroup | None:
    """Return the process group of that name, None for the empty name (an axis of size 1)."""
    if not name:
        return None
    group: ProcessGroup = _c10d._resolve_process_group(name)  # type: ignore[attr-defined,arg-type,unused-ignore]
    return group


def group_name(group: ProcessGroup | None) -> str:
    """Return the name under which `group_by_name` finds a group; empty for a group of one rank, whose steps vanish."""
    return "" if group is None or dist.get_world_size(group) == 1 else str(group.group_name)


def group_of(blocks: tuple[tuple[int, ...], ...]) -> ProcessGroup | None:
    """Return this rank's group of a partition of the world into blocks of ranks; None for blocks of one rank.

    Every rank must call it with the same blocks. Equal partitions share their groups.
    """
    if len(blocks[0]) == 1:
        return None
    if len(blocks) == 1 and len(blocks[0]) == dist.get_world_size():
        return dist.group.WORLD
    return _new_groups(blocks)


def once_in_a_world(make: Callable[_P, _T]) -> Callable[_P, _T]:
    """Make each thing once for equal arguments in a world, and let it go with that: a process group has threads that wake the process up."""
    worlds: dict[weakref.ref[ProcessGroup], dict[Any, _T]] = {}

    @wraps(make)
    def made(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        world = dist.group.WORLD
        if world is None or kwargs:
            return make(*args, **kwargs)
        key = weakref.ref(world)
        if key not in worlds:
            worlds[key] = {}
            when_destroyed(world, partial(worlds.pop, key, None))
        if args not in worlds[key]:
            worlds[key][args] = make(*args, **kwargs)
        return worlds[key][args]

    return made


@once_in_a_world
def _new_groups(blocks: tuple[tuple[int, ...], ...]) -> ProcessGroup | None:
    """Make the groups of a partition and return this rank's."""
    own = None
    for ranks in blocks:
        group = dist.new_group(list(ranks))
        if dist.get_rank() in ranks:
            own = group
            take_worlds_timeout(group)
    return own


def is_registered(group: ProcessGroup) -> bool:
    """Return whether a group still exists: `destroy_process_group` ends it, whoever holds it."""
    return group in _c10d._world.pg_map  # type: ignore[attr-defined,unused-ignore]


def when_destroyed(group: ProcessGroup, function: Callable[[], object]) -> None:
    """Call a function when `destroy_process_group` has ended a group.

    torch has no hook for that. Its table of groups is what holds a group's store, while a group is held by caches and users too.
    """
    weakref.finalize(_c10d._world.pg_map[group][1], function).atexit = False  # type: ignore[attr-defined,unused-ignore]


def timeout_s() -> float:
    """Return the time limit of the world's collectives."""
    world: Any = dist.group.WORLD
    return min(float(world._get_backend(each).options._timeout.total_seconds()) for each in world._device_types)


def take_worlds_timeout(group: ProcessGroup) -> None:
    """Give a group the time limit of the world: torch gives each new one its own default of 10 or 30 minutes."""
    _c10d._set_pg_timeout(timedelta(seconds=timeout_s()), group)


def is_on_hosts(group: ProcessGroup) -> bool:
    """Return whether a group is gloo's: its tensors lie in the memory of the ranks' hosts."""
    return bool(dist.get_backend(group) == "gloo")


def world() -> ProcessGroup | None:
    """Return the group of all ranks, None without processes."""
    return dist.group.WORLD if dist.is_initialized() else None


def size_of(group: ProcessGroup | None) -> int:
    """Return the number of ranks of a group, 1 for None."""
    return 1 if group is None else dist.get_world_size(group)


def rank_in(group: ProcessGroup | None) -> int:
    """Return this rank's place in a group, 0 for None."""
    return 0 if group is None else dist.get_rank(group)


def exchange(buffer: Tensor, sent: Sequence[int], received: Sequence[int], group: ProcessGroup) -> Tensor:
    """Send `sent[i]` leading elements of a flat buffer to rank i and return the flat buffer of `received[i]` from each rank i.

    Shapes: (sum(sent),) -> (sum(received),). Communicates: one all_to_all_single, sum(sent) - sent[own rank] elements leave this rank.
    """
    output = buffer.new_empty(sum(received))
    dist.all_to_all_single(output, buffer, list(received), list(sent), group=group)
    return output


def next_turn(group: ProcessGroup) -> int:
    """Return the number of a group's next pass of `Transfer`s, by which their messages are told from those of other passes."""
    _turns[group] = _turns.get(group, 0) + 1
    return _turns[group] % 2**30


def turns_begun(group: ProcessGroup | None) -> int:
    """Return how many turns this rank has begun on a group."""
    return 0 if group is None else _turns.get(group, 0)


class Transfer:
    """A point-to-point hop in flight: one send and one receive, either of which may be empty.

    A class because a transfer has a lifetime: the sent buffer must live, and the received one is valid only after `wait`.

    Args:
        sent: what goes to the rank `to`.
        received: where the message of the rank `source` lands.
        group: the ranks.
        turn: as given by `next_turn`, the same on all ranks. NCCL does not look at it: there messages match by their order alone.
    """

    def __init__(self, sent: Tensor, to: int, received: Tensor, source: int, group: ProcessGroup, turn: int) -> None:
        self._sent, self._received = sent, received
        tag, operations = _FIRST_TURN_TAG + turn, []
        if sent.numel():
            operations.append(dist.P2POp(dist.isend, sent, group=group, group_peer=to, tag=tag))
        if received.numel():
            operations.append(dist.P2POp(dist.irecv, received, group=group, group_peer=source, tag=tag))
        self._works = dist.batch_isend_irecv(operations) if operations else []

    def wait(self) -> Tensor:
        """Return the received buffer, complete."""
        while self._works:
            self._works.pop().wait()  # each once: waiting for the same one twice never ends
        return self._received

    @property
    def in_flight(self) -> bool:
        """Whether something of it was not waited for."""
        return bool(self._works)

    def release(self) -> None:
        """Say that the received buffer was used: nothing to do, it is this rank's own."""


def is_gloo_on_cpu(group: ProcessGroup) -> bool:
    """Return whether a group moves host tensors by gloo."""
    cpu = torch.device("cpu")
    return cpu in group._device_types and group._get_backend(cpu).name() == "gloo"


def gather(tensor: Tensor, group: ProcessGroup | None) -> list[Tensor]:
    """Return the equally shaped tensors of all ranks, in rank order; of any dtype, for they go as bytes: no backend takes all.

    Communicates: one all_gather, (group size - 1) x the tensor's bytes received.
    """
    if group is None or dist.get_world_size(group) == 1:
        return [tensor]
    held = tensor.detach().contiguous().view(-1).view(torch.uint8)
    parts = [torch.empty_like(held) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, held, group=group)
    return [part.view(tensor.dtype).view(tensor.shape) for part in parts]


def gather_objects(value: Any, group: ProcessGroup | None = None) -> list[Any]:
    """Return the picklable values of all ranks, in rank order; small ones only, outside a step."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def barrier(device: torch.device) -> None:
    """Wait for the whole world. On NCCL it runs on `device`, this rank's own, and not on a guess."""
    dist.barrier(device_ids=[device.index] if dist.get_backend() == "nccl" else None)


def broadcast_object(value: Any, group: ProcessGroup | None, source: int = 0) -> Any:
    """Return rank `source`'s picklable value (its rank within the group) on all ranks of the group."""
    box = [value]
    dist.broadcast_object_list(box, group=group, group_src=source)
    return box[0]


def broadcast(tensor: Tensor, group: ProcessGroup | None = None, source: int = 0) -> Tensor:
    """Overwrite `tensor` with that of rank `source` within the group and return it."""
    dist.broadcast(tensor, group=group, group_src=source)
    return tensor


def reduce_sum(tensor: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Return the sum over a group's ranks (the world for None), not differentiable; the tensor itself without processes."""
    if not dist.is_initialized():
        return tensor
    total = tensor.detach().clone()
    dist.all_reduce(total, group=group)
    return total


def largest(tensor: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Return the elementwise largest over a group's ranks (the world for None); the tensor itself without processes.

    Communicates: one all_reduce of the tensor.
    """
    if not dist.is_initialized():
        return tensor
    found = tensor.detach().clone()
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    return found


class _SumOverRanks(torch.autograd.Function):
    """Sum over ranks whose mirror is the sum of the cotangents: equal on all ranks, hence a product with the group's size."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup | None) -> Tensor:
        ctx.size = dist.get_world_size(group)
        total = tensor.detach().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return grad_outputs[0] * ctx.size, None


def sum_over_ranks(tensor: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Return the differentiable sum over a group's ranks (the world for None).

    The result takes part in a loss that is the same number on every rank, so the mirror of the sum, the sum of equal cotangents, is a
    product with the number of ranks and needs no communication. FSDP's averaging over the same ranks then undoes exactly that factor.

    Communicates: one all_reduce of the tensor in the forward, nothing in the backward.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return tensor
    total: Tensor = _SumOverRanks.apply(tensor, group)  # type: ignore[no-untyped-call]
    return total


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


def make_fsdp_root(root: torch.nn.Module) -> None:
    """Initialise FSDP2's state with `root` as its root, as the first forward would."""
    root._get_fsdp_state()._lazy_init()  # type: ignore[operator]


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
