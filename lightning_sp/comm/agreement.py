"""Ranks agree: one error raised on all of them, equal values, the same batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_sp.comm.collectives import gather_objects
from lightning_sp.comm.differences import digest_of, told_differences
from lightning_sp.comm.groups import takes_host_tensors, world
from lightning_sp.comm.meetings.failing_together import check_peers
from lightning_sp.devices import makes_host_wait, runtime
from lightning_sp.errors import SequenceParallelError


def agree(error: str | None, group: ProcessGroup | None = None) -> None:
    """Raise the same error on every rank of a group when any rank has one. Every rank must call it.

    Communicates: one all_reduce of 8 bytes; the messages travel only when there is an error.

    Raises:
        SequenceParallelError: with the message of each rank that has one.
    """
    if not dist.is_initialized():
        if error:
            raise SequenceParallelError(error)
        return
    whole = group or world()
    assert whole is not None
    check_peers(whole, "an agreement")
    device = torch.device("cpu") if takes_host_tensors(whole) else torch.device("cuda", torch.cuda.current_device())
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
    """Return whether an int64 tensor is equal on all ranks of a group. Every rank must call it.

    Communicates: one all_reduce of twice the tensor's bytes.
    """
    if not dist.is_initialized():
        return True
    check_peers(group, "a comparison", value)
    both = torch.stack([value, -value])
    dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
    return bool((both[0] == -both[1]).all().item())


def are_alike(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Return whether a tensor is the same on all ranks of a group, to the bit, and no mask, count or constant: those say nothing.

    Without waiting for the device. Every rank must call it.

    Communicates: one all_reduce of 16 bytes.
    """
    check_peers(group, "a comparison of tokens")
    values = x.detach().double().reshape(-1)
    number = (values.view(torch.int64) * (2 * torch.arange(len(values), device=x.device) + 1) * 0x9E3779B97F4A7C1).sum()
    both = torch.stack([number, -number])
    dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
    speaks = (values != values.round()).any() & (values != values[:1]).any()
    return (both[0] == -both[1]) & speaks


class Largest:
    """The elementwise largest of a host tensor over a group's ranks, in flight: asked for now, read when it is needed. Every rank must make one.

    Args:
        values: this rank's.
        group: on a backend for host tensors; None is the world.

    Communicates: one all_reduce of the tensor.
    """

    def __init__(self, values: Tensor, group: ProcessGroup | None = None) -> None:
        check_peers(group, "an all-reduce for the largest", values)
        self._values = values
        self._work = dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group, async_op=True)

    def arrived(self) -> Tensor:
        """Return it, the same on all ranks."""
        self._work.wait()
        return self._values


class Spread:
    """How far apart numbers are within parts of the world, in flight: started in one step, read in the next. Every rank must make one.

    Args:
        values: this rank's, float64.
        tolerance: how far they may be apart, relative to the largest.
        part: the part of the world that this rank's numbers are compared in.
        num_parts: how many there are.

    Communicates: one all_reduce of 16 bytes for each value and part.
    """

    def __init__(self, values: Tensor, tolerance: float, part: int = 0, num_parts: int = 1) -> None:
        check_peers(None, "a comparison of numbers")
        self._tolerance = tolerance
        # nan is no larger than anything, on any rank.
        values = torch.nan_to_num(values)
        self._both = values.new_full((2, num_parts, len(values)), -torch.inf)
        self._both[0, part], self._both[1, part] = values, -values
        work = dist.all_reduce(self._both, op=dist.ReduceOp.MAX, async_op=True)
        self._work, self._copied, self._arrived = work, None, False
        if makes_host_wait(values):
            work.wait()  # the stream waits, not the host
            self._both = self._both.to("cpu", non_blocking=True)
            self._copied = runtime(values.device).Event(blocking=True)  # else the host spins
            self._copied.record()

    def are_too_wide(self) -> list[bool]:
        """Return which values differ by more than the tolerance in some part of the world; the same on all ranks."""
        self._arrive()
        highest, lowest = self._both[0], -self._both[1]
        wide = highest - lowest > self._tolerance * torch.maximum(highest.abs(), lowest.abs())
        return [bool(each) for each in wide.any(0)]

    def largest(self) -> list[float]:
        """Return each value's largest in the world, nan counted as 0; the same on all ranks."""
        self._arrive()
        return [float(each) for each in self._both[0].amax(0)]

    def _arrive(self) -> None:
        if self._arrived:
            return
        if self._copied is not None:
            self._copied.synchronize()
        else:
            self._work.wait()
        self._arrived = True


class _RankReport(NamedTuple):
    """What a rank says of its batch to all others."""

    has_error: int
    digest: int
    data_parallel_rank: int
    num_ring_passes: int
    entries: int
    is_whole: int
    loop: int
    buffers: int
    shards: int


class Written(NamedTuple):
    """What a rank has written since ranks last compared it.

    Args:
        buffers: a number that tells which buffers, 0 for none.
        shards: a number that tells how often its shards and their gradients.
        described: gives that in words, by name.
    """

    buffers: int = 0
    shards: int = 0
    described: Callable[[], Mapping[str, str]] = dict


NOTHING_WRITTEN = Written()


class BatchFlags(NamedTuple):
    """What is so of a batch on some rank.

    Args:
        ends: the rank was told to end the run.
        longer: its part is longer than those before.
        padded: the degrees do not divide the batch's length.
        changed: numbers by which the step may do other things have changed.
        fillers: none of its rows counts: they only keep other ranks' collectives company.
    """

    ends: bool = False
    longer: bool = False
    padded: bool = False
    changed: bool = False
    fillers: bool = False


class SameBatch(NamedTuple):
    """What ranks have told each other of a batch: whether they differ in its entries, what is so on any, whether any has written to buffers,
    and all to the same ones, and how many rows of each data-parallel group count."""

    uneven: bool
    of_any: BatchFlags
    writes_buffers: bool = False
    same_buffers: bool = True
    rows: tuple[int, ...] = ()


def check_same_batch(
    error: str | None,
    *,
    digest: int,
    data_parallel_rank: int,
    num_ring_passes: int,
    num_groups: int,
    entries: int = 0,
    is_whole: bool = False,
    rows: int = 0,
    flags: BatchFlags = BatchFlags(),  # noqa: B008  immutable
    loop: Mapping[str, Any] = MappingProxyType({}),
    written: Written = NOTHING_WRITTEN,
    group: ProcessGroup | None = None,
) -> SameBatch:
    """Raise on every rank when any rank has an error, or when ranks of one sequence read different samples. Every rank must call it.

    Args:
        error: this rank's error, None if none.
        digest: a number that identifies this rank's whole batch.
        data_parallel_rank: of this rank; ranks with equal ones share their sequences.
        num_ring_passes: passes of the ring that this rank has begun. A rank that failed before its pass and went on stays behind the others,
            and would use the keys of one pass for those of another.
        entries: a number that tells which entries the batch holds.
        num_groups: data-parallel groups, of which each has a number of ranks that share their sequences.
        is_whole: the batch holds no sequence, and is not split.
        rows: of it that count.
        flags: of this rank.
        loop: plain values by name, by which a loop decides what follows this batch.
        written: what this rank has written to outside of its steps.
        group: a CPU-capable group over the world.

    Communicates: one all_reduce on the host, of 128 bytes and 40 for each data-parallel group. Where ranks differ, as `_refuse`.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        if error:
            raise SequenceParallelError(error)
        return SameBatch(uneven=False, of_any=flags, rows=(rows,))
    report = _RankReport(
        1 if error else 0,
        digest,
        data_parallel_rank,
        num_ring_passes,
        entries,
        int(is_whole),
        digest_of(loop),
        written.buffers,
        written.shards,
    )
    of_all, of_groups, rows_of_groups = _largest_and_least(report, flags, num_groups, rows, group)
    failed, *of_any = map(bool, of_all[:6].tolist())
    uneven, wholes, loops, others, writes = (of_all[6::2] != -of_all[7::2]).tolist()
    if not (failed or wholes or loops or writes or bool((of_groups[0] != -of_groups[1]).any())):
        rows_told = tuple(rows_of_groups.tolist())
        return SameBatch(uneven, BatchFlags(*of_any), bool(of_all[12]), same_buffers=not others, rows=rows_told)
    _refuse(report, error, loop, written, group)


def _refuse(
    report: _RankReport, error: str | None, loop: Mapping[str, Any], written: Written, group: ProcessGroup | None
) -> NoReturn:
    """Raise on all ranks what they differ in. Communicates: one all_gather of what each has said, by which all name the same ones."""
    own = torch.tensor(report, dtype=torch.int64)
    rows = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, own, group=group)
    reports = [_RankReport(*row.tolist()) for row in rows]
    if any(report.has_error for report in reports):
        agree(error, group)
    _check_passes(reports)
    _check_loops(reports, loop, group)  # where one validates and another trains, their samples differ for that
    _check_digests(reports)
    _check_whole(reports)
    if len({each.shards for each in reports}) > 1:
        refuse_writes(written.described(), group)
    raise SequenceParallelError(
        "ranks report different things of one batch, though their entries, loops and passes are equal: a rank joined late or has ended; "
        "start all ranks again, from the last checkpoint"
    )


def _largest_and_least(
    report: _RankReport, flags: tuple[bool, ...], num_groups: int, rows: int, group: ProcessGroup | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the largest of all ranks, and of each data-parallel group, of each number and of its negative; and the
    rows of each data-parallel group.

    Shapes: (16,): failed, the five flags, and of entries, whole, loop, buffers and shards each with its negative; (2, num_groups, 2): digest
    and passes, and their negatives; (num_groups,).
    """
    numbers = (report.entries, report.is_whole, report.loop, report.buffers, report.shards)
    bounds = tuple(sign * number for number in numbers for sign in (1, -1))
    of_all = torch.tensor([report.has_error, *map(int, flags), *bounds])
    of_groups = torch.full((2, num_groups, 2), torch.iinfo(torch.int64).min)
    rows_of_groups = torch.full((num_groups,), torch.iinfo(torch.int64).min)
    rows_of_groups[report.data_parallel_rank] = rows
    number = torch.tensor([report.digest, report.num_ring_passes])
    of_groups[0, report.data_parallel_rank], of_groups[1, report.data_parallel_rank] = number, -number
    told = torch.cat([of_all, of_groups.view(-1), rows_of_groups])
    dist.all_reduce(told, op=dist.ReduceOp.MAX, group=group)
    return told[:16], told[16:-num_groups].view(2, num_groups, 2), told[-num_groups:]


def refuse_writes(own: Mapping[str, str], group: ProcessGroup | None) -> NoReturn:
    """Raise on all ranks which shards and gradients they have written to differently. Communicates: what each rank has, in words, by name."""
    raise SequenceParallelError(
        f"ranks have written to their parts of the model differently: {told_differences(gather_objects(dict(own), group))}: each would go on "
        "with its own part of a matrix; call zero_grad(), set a gradient or write to a parameter on all ranks, or on none"
    )


def _check_passes(reports: list[_RankReport]) -> None:
    passes: dict[int, list[int]] = {}
    for report in reports:
        passes.setdefault(report.data_parallel_rank, []).append(report.num_ring_passes)
    for data_rank, numbers in passes.items():
        if len(set(numbers)) > 1:
            raise SequenceParallelError(
                f"the ranks of data-parallel group {data_rank} have begun {numbers} passes of ring attention: must be equally many. One of them "
                "failed or left attention out, and went on; let such an error end the run, and resume it from a checkpoint"
            )


def _check_whole(reports: list[_RankReport]) -> None:
    groups = [sorted({each.data_parallel_rank for each in reports if each.is_whole == whole}) for whole in (0, 1)]
    if all(groups):
        raise SequenceParallelError(
            f"data-parallel groups {groups[0]} hold a sequence in this batch, groups {groups[1]} hold none: what the one splits the other runs "
            "whole, and their losses are sums over other numbers of ranks; give all groups batches of one kind in each step"
        )


def _check_loops(reports: list[_RankReport], own: Mapping[str, Any], group: ProcessGroup | None) -> None:
    if len({report.loop for report in reports}) > 1:
        raise SequenceParallelError(
            f"ranks would go on in other ways: {told_differences(gather_objects(dict(own), group))}: must be the same on all, for each would "
            "wait for what the others leave out; change it on all ranks, or on none: by what all know, or as "
            "self.trainer.strategy.reduce_boolean_decision(mine, all=False) answers all of them"
        )


def _check_digests(reports: list[_RankReport]) -> None:
    readers: dict[int, dict[int, list[int]]] = {}
    for rank, report in enumerate(reports):
        readers.setdefault(report.data_parallel_rank, {}).setdefault(report.digest, []).append(rank)
    for data_rank, digests in readers.items():
        if len(digests) > 1:
            raise SequenceParallelError(
                f"ranks {sorted(digests.values())} of data-parallel group {data_rank} share one sequence but read different samples: the loader "
                "must give all of them the same, tensors and numbers beside them (no time, no rank); let the strategy replace the sampler, "
                "seed it by epoch alone, or split an iterable dataset by trainer.strategy.data_parallel_rank and data_parallel_size"
            )
