"""Memory of one rank that the other ranks of its group read in place: for ranks that are processes of one machine.

Every rank owns one arena, a file of /dev/shm that never has a name: the others open it through /proc/<pid>/fd, and when the last process that
holds it ends, even by SIGKILL, the kernel frees it. Owns the files, their growth and the one-byte signals that say when memory may be read or
written again; what lies in it is the caller's concern.

    rank 0's arena  [token | ......... ]<--- mapped by ranks 0, 1, 2, 3
    rank 1's arena  [token | ......... ]<--- mapped by ranks 0, 1, 2, 3         reading: a load;   waiting: one byte by gloo
    ...

An arena grows to the largest message so far and is never made smaller; it goes with its process group.
"""

from __future__ import annotations

import math
import mmap
import os
import secrets
import socket
import warnings
import weakref
from collections.abc import Iterable, Sequence
from enum import IntEnum
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_sp import comm
from lightning_sp.errors import SequenceParallelError

FOLDER = "/dev/shm"
# The first page holds the token by which the others know the file; data begin behind it.
BEGIN = mmap.PAGESIZE
_ALIGNMENT = 64  # a cache line: what two ranks write never shares one
_TOKEN_BYTES = 16

# By the group's name, which is all that an operator can be given under torch.compile. They go with their group.
_arenas: dict[str, Arena] = {}


class Signal(IntEnum):
    """What a one-byte message says; the tag keeps the kinds, and other users of the group, apart."""

    READY = 0x5350_0001  # the sender's keys and values may be read
    DONE = 0x5350_0002  # the sender has used the receiver's
    HOME = 0x5350_0003  # the sender has written gradients of the receiver's
    ADDED = 0x5350_0004  # the sender has added those


class Arena:
    """This rank's memory and, mapped, that of the group's other ranks. Make it by `connect`.

    A class because it holds files, mappings and the signals in flight.

    Args:
        group: the ranks.
        files: descriptors of the ranks' files, in rank order.
    """

    def __init__(self, group: ProcessGroup, files: Sequence[int]) -> None:
        self.group, self.rank = group, comm.rank_in(group)
        self.capacity = BEGIN
        self._files = list(files)
        self._maps: list[mmap.mmap | None] = [None] * len(files)
        self._too_much, self._free = math.inf, 0
        self._warned = False
        self._pending: list[comm.Byte] = []
        # The memory is freed when every rank has closed them, and no tensor of `view` is left.
        weakref.finalize(self, _close, tuple(files))

    def reserve(self, num_bytes: int) -> str:
        """Make every rank's arena hold `num_bytes` of data; every rank must call it with the same number, in the same order of calls.

        Returns:
            Why it cannot be, the same on all ranks; empty if it is.

        Communicates: one all_gather of 8 bytes a rank, only when the arenas have to grow.
        """
        needed = BEGIN + num_bytes
        if needed <= self.capacity:
            return ""
        if needed < self._too_much:
            self.settle()
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
        """Say on the group's first rank that the network is taken instead, and why."""
        if self.rank == 0 and not self._warned:
            warnings.warn(f"ring_transport='auto' takes the network: {reason}", stacklevel=2)
        self._warned = True

    def view(self, rank: int, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor in a rank's arena, in place; `offset` is in bytes, from where data begin."""
        held = self._maps[rank]
        if held is None:
            held = self._maps[rank] = mmap.mmap(self._files[rank], self.capacity)
        return torch.frombuffer(held, dtype=dtype, count=math.prod(shape), offset=BEGIN + offset).view(*shape)

    def send(self, signal: Signal, to: int) -> None:
        """Tell a rank something. Communicates: one byte."""
        self._pending.append(comm.send_byte(to, int(signal), self.group))

    def expect(self, signal: Signal, source: int) -> comm.Byte:
        """Begin to listen for a rank's signal; its `wait` returns when it has come."""
        return comm.receive_byte(source, int(signal), self.group)

    def expect_before_reuse(self, signal: Signal, source: int) -> comm.Byte:
        """Begin to listen for a signal that says that this rank's memory was read: `settle` waits for it."""
        self._pending.append(self.expect(signal, source))
        return self._pending[-1]

    def settle(self) -> None:
        """Wait until no other rank reads this rank's memory, and until what this rank has sent has arrived."""
        pending, self._pending = self._pending, []
        for each in pending:
            each.wait()


def connect(group: ProcessGroup | None) -> str:
    """Make an arena on every rank of a group and map them all, once for a group. Every rank of it must call this.

    Returns:
        Why its ranks cannot share memory, the same on all of them; empty if they can, and for a group of one rank.

    Communicates: two all_gathers of some hundred bytes on the group, the first time.
    """
    name = comm.group_name(group)
    if group is None or not name or arena_of(name) is not None:
        return ""
    if not comm.is_on_hosts(group):
        return "the ranks are not CPU ranks that talk by gloo"
    own, token, error = _own_file()
    places = comm.gather_objects((_machine(), os.getpid(), own, token, error), group)
    files: list[int] = []
    reasons = [error for *_, error in places if error]
    machines = sorted({machine for machine, *_ in places})
    if len(machines) > 1:
        reasons.append(
            f"the ranks are on {len(machines)} machines, {', '.join(machine.split()[0] for machine in machines)}"
        )
    if not reasons:
        files, error = _open_all(places, comm.rank_in(group), own)
        reasons = [each for each in comm.gather_objects(error, group) if each]
    if reasons:
        _close({own, *files} - {-1})
        return str(reasons[0])
    _arenas[name] = Arena(group, files)
    comm.when_destroyed(group, partial(_arenas.pop, name, None))
    return ""


def arena_of(name: str) -> Arena | None:
    """Return the arena that `connect` made for the group of that name, None if it made none."""
    arena = _arenas.get(name)
    return arena if arena is not None and comm.is_registered(arena.group) else None


def reserved_arena(name: str, transport: str, num_bytes: int) -> Arena | None:
    """Return a group's arena with room for `num_bytes`, None where the network is to be taken. Every rank of the group must call it.

    Args:
        name: of the group; empty for one rank.
        transport: "auto", "shared_memory" or "network".
        num_bytes: the same on all ranks.

    Raises:
        SequenceParallelError: "shared_memory" was asked for, and there is not enough of it; on all ranks of the group.
    """
    arena = None if transport == "network" else arena_of(name)
    if arena is None:
        return None
    reason = arena.reserve(num_bytes)
    if not reason:
        return arena
    if transport == "shared_memory":
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


def _machine() -> str:
    """Return a host's name, and the number that its kernel drew when it started: machines may share a name."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = "unknown"
    return f"{socket.gethostname()} {boot}"


def _own_file() -> tuple[int, bytes, str]:
    """Make this rank's file, one page long and without a name. Returns (descriptor or -1, token, why not)."""
    token, file = secrets.token_bytes(_TOKEN_BYTES), -1
    try:
        file = os.open(FOLDER, os.O_TMPFILE | os.O_RDWR, 0o600)
        os.posix_fallocate(file, 0, BEGIN)
        os.pwrite(file, token, 0)
    except (OSError, AttributeError) as error:  # no Linux: no O_TMPFILE
        if file >= 0:
            os.close(file)
        return -1, token, f"no file can be made in {FOLDER} ({error})"
    return file, token, ""


def _open_all(places: Sequence[tuple[str, int, int, bytes, str]], rank: int, own: int) -> tuple[list[int], str]:
    """Open every rank's file, each known by its token: in another container the number may be another process'."""
    files: list[int] = []
    for other, (_, process, number, token, _) in enumerate(places):
        if other == rank:
            files.append(own)
            continue
        try:
            # Not os.O_RDWR at once: what another process has under that number may be a device or a pipe.
            path = f"/proc/{process}/fd/{number}"
            if os.stat(path).st_nlink or not os.path.isfile(path):
                return (
                    files,
                    f"rank {rank} finds no shared memory of rank {other}: containers with processes of their own?",
                )
            files.append(os.open(path, os.O_RDWR))
        except OSError as error:
            return files, f"rank {rank} cannot open the shared memory of rank {other} ({error})"
        if os.pread(files[-1], _TOKEN_BYTES, 0) != token:
            return files, f"rank {rank} finds no shared memory of rank {other}: containers with processes of their own?"
    return files, ""


def _close(files: Iterable[int]) -> None:
    for file in files:
        os.close(file)


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:.1f}"
