"""Memory of one rank that the other ranks of its group read in place: for ranks that are processes of one machine.

Every rank owns one arena, a file of /dev/shm, and maps those of the others. Owns their growth and the signals that say when memory may be read
or written again; what lies in it is the caller's concern.

    rank 0's arena  [token | ......... ]<--- mapped by ranks 0, 1, 2, 3
    rank 1's arena  [token | ......... ]<--- mapped by ranks 0, 1, 2, 3         reading: a load;   waiting: 4 bytes of a pipe
    ...

An arena grows to the largest message so far and is never made smaller; it goes with its process group.
"""

from __future__ import annotations

import math
import mmap
import os
import warnings
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_sp import comm
from lightning_sp.comm.cpu.pipes import Signal, Signals
from lightning_sp.comm.cpu.same_host import PAGE, offer, open_file, open_pipe, why_apart
from lightning_sp.errors import SequenceParallelError

FOLDER = "/dev/shm"
_ALIGNMENT = 64  # a cache line: what two ranks write never shares one

# By the group's name, which is all that an operator can be given under torch.compile. They go with their group.
_arenas: dict[str, Arena] = {}


class Arena:
    """This rank's memory and, mapped, that of the group's other ranks. Make it by `connect`.

    A class because it holds files, mappings and the signals in flight.

    Args:
        group: the ranks.
        files: descriptors of the ranks' files, in rank order.
        signals: this rank's pipes.
    """

    def __init__(self, group: ProcessGroup, files: Sequence[int], signals: Signals) -> None:
        self.group, self.rank, self._signals = group, comm.rank_in(group), signals
        self.capacity = PAGE
        self._files = list(files)
        self._maps: list[mmap.mmap | None] = [None] * len(files)
        self._too_much, self._free = math.inf, 0
        self._warned = False
        self._owed: list[tuple[Signal, int]] = []
        self._turn = 0

    def reserve(self, num_bytes: int) -> str:
        """Make every rank's arena hold `num_bytes` of data; every rank must call it with the same number, in the same order of calls.

        Returns:
            Why it cannot be, the same on all ranks; empty if it is.

        Communicates: one all_gather of 8 bytes a rank, only when the arenas have to grow.
        """
        needed = PAGE + num_bytes
        if needed <= self.capacity:
            return ""
        if needed < self._too_much:
            missing = self._grow(needed)
            free = [int(each) for each in comm.gather(torch.tensor([missing]), self.group)]
            if all(each < 0 for each in free):
                self.capacity = needed
                self._maps = [None] * len(self._files)
                return ""
            os.ftruncate(self._files[self.rank], self.capacity)
            self._too_much = needed
            self._free = min(each for each in free if each >= 0)
        return (
            f"the ring needs {_mib(needed)} MiB of shared memory on each of {len(self._files)} ranks, {FOLDER} has {_mib(self._free)} MiB free; "
            "make it larger (docker run --shm-size, or mount -o remount,size=)"
        )

    def _grow(self, needed: int) -> int:
        """Allocate this rank's own pages, so that no later write can fail; return -1, or the bytes that are free if they are too few."""
        free = free_bytes()
        if free < needed - self.capacity:
            return free
        try:
            os.posix_fallocate(self._files[self.rank], 0, needed)
        except OSError:  # another process was faster
            return free_bytes()
        return -1

    def warn_once(self, reason: str) -> None:
        """Say on the group's first rank that the network carries the keys instead, and why."""
        if self.rank == 0 and not self._warned:
            warnings.warn(f"ring_transport='auto' takes the network: {reason}", stacklevel=2)
        self._warned = True

    def view(self, rank: int, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor in a rank's arena, in place; `offset` is in bytes, from where data begin."""
        memory = self._maps[rank]
        if memory is None:
            memory = self._maps[rank] = mmap.mmap(self._files[rank], self.capacity)
        return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape), offset=PAGE + offset).view(*shape)

    def begin(self) -> None:
        """Begin the next use of the memory: wait until no other rank reads what this rank wrote in the last one."""
        owed, self._owed = self._owed, []
        for signal, source in owed:
            self._signals.wait(signal, source, self._turn)
        self._turn += 1
        self._signals.forget(self._turn)

    @property
    def turn(self) -> int:
        """Return how many uses of the memory this rank has begun."""
        return self._turn

    def send(self, signal: Signal, to: int) -> None:
        """Tell a rank something."""
        self._signals.send(signal, to, self._turn)

    def wait(self, signal: Signal, source: int) -> None:
        """Return when a rank's signal has come."""
        if (signal, source) in self._owed:
            self._owed.remove((signal, source))
        self._signals.wait(signal, source, self._turn)

    def owe(self, signal: Signal, source: int) -> None:
        """Have the next `begin` wait for a signal that says that a rank has read this rank's memory."""
        self._owed.append((signal, source))


def connect(group: ProcessGroup | None) -> str:
    """Make an arena on every rank of a group and map them all, once for a group. Every rank of it must call this.

    Returns:
        Why its ranks cannot share memory, the same on all of them; empty if they can, and for a group of one rank.

    Communicates: two all_gathers of some hundred bytes on the group, the first time.
    """
    name = comm.group_name(group)
    if group is None or not name or arena_of(name) is not None:
        return ""
    if not comm.is_gloo_on_cpu(group):
        return "the ranks are not CPU ranks that talk by gloo"
    rank, size, reason = comm.rank_in(group), comm.size_of(group), ""
    others, readers = [other for other in range(size) if other != rank], dict[int, int]()
    with ExitStack() as descriptors:
        with ExitStack() as lent:
            offers = comm.gather_objects(offer(FOLDER, others, readers, descriptors, lent), group)
            files, writers = {rank: offers[rank].file}, {}
            try:
                reason = why_apart(offers)
                for other in others if not reason else ():
                    files[other] = open_file(offers, rank, other, descriptors)
                    writers[other] = open_pipe(offers, rank, other, descriptors)
            except SequenceParallelError as error:
                reason = str(error)
            # The others may open what is lent until every rank has come here.
            reason = next((each for each in comm.gather_objects(reason, group) if each), "")
        if reason:
            return reason
        arena = Arena(group, [files[other] for other in range(size)], Signals(rank, readers, writers, comm.timeout_s))
        # Its memory is freed when every rank has closed the files, and no tensor of `view` is left.
        weakref.finalize(arena, descriptors.pop_all().close)
    _arenas[name] = arena
    comm.when_destroyed(group, partial(_forget, name, weakref.ref(arena)))
    return ""


def _forget(name: str, arena: weakref.ref[Arena]) -> None:
    """Let an arena go, unless the next world's group has made one by that name: whoever holds the store of a world outlives it."""
    if _arenas.get(name) is arena():
        _arenas.pop(name, None)


def arena_of(name: str) -> Arena | None:
    """Return the arena that `connect` made for the group of that name, None if it made none."""
    arena = _arenas.get(name)
    return arena if arena is not None and comm.is_registered(arena.group) else None


def reserved_arena(name: str, num_bytes: int, *, required: bool) -> Arena | None:
    """Return a group's arena with room for `num_bytes`, None where it has none. Every rank of the group must call it.

    Args:
        name: of the group; empty for one rank.
        num_bytes: the same on all ranks.
        required: whether shared memory was asked for by name; else the group's first rank warns, once.

    Raises:
        SequenceParallelError: it is required, and there is not enough of it; on all ranks of the group.
    """
    arena = arena_of(name)
    if arena is None:
        return None
    reason = arena.reserve(num_bytes)
    if not reason:
        return arena
    if required:
        raise SequenceParallelError(f"ring_transport='shared_memory': {reason}, or use ring_transport='network'")
    arena.warn_once(reason)
    return None


def aligned(num_bytes: int) -> int:
    """Return the smallest offset from `num_bytes` on where a tensor may begin."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def free_bytes() -> int:
    """Return what is free in the folder of shared memory."""
    found = os.statvfs(FOLDER)
    return found.f_bavail * found.f_frsize


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:.1f}"
