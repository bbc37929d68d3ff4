"""What processes of one machine open of each other: a file of memory without a name, and pipes, through /proc/<pid>/fd.

Nothing here ever has a name, so nothing can be left behind: when the last process that holds it ends, even by SIGKILL, the kernel frees it.
Whether another's can be opened is found by opening it: ranks in containers may share a host's name and not its processes.
"""

from __future__ import annotations

import mmap
import os
import secrets
import socket
import stat
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from lightning_sp.errors import SequenceParallelError

# The first page of a file holds its token; data begin behind it.
PAGE = mmap.PAGESIZE
_TOKEN_BYTES = 16


@dataclass(frozen=True)
class Offer:
    """Where a rank's memory and pipes are to be found.

    Args:
        machine: the host's name, and the number that its kernel drew when it started: machines may share a name.
        process: its number.
        file: the descriptor of its memory.
        token: what lies at the memory's begin.
        pipes: for each other rank, the writing end of the pipe at which that rank's signals come.
        error: why it offers nothing; empty if it does.
    """

    machine: str
    process: int
    file: int = -1
    token: bytes = b""
    pipes: dict[int, int] = field(default_factory=dict)
    error: str = ""


def offer(
    folder: str, others: Sequence[int], readers: dict[int, int], descriptors: ExitStack, lent: ExitStack
) -> Offer:
    """Make this rank's file, one page long, and its pipes.

    Args:
        folder: of shared memory.
        others: the other ranks.
        readers: filled with the descriptors at which their signals come.
        descriptors: closes this rank's file and its ends of the pipes.
        lent: closes what is only there for the others to open.
    """
    token = secrets.token_bytes(_TOKEN_BYTES)
    try:
        file = os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
        descriptors.callback(os.close, file)
        os.posix_fallocate(file, 0, PAGE)
        os.pwrite(file, token, 0)
        pipes = {}
        for other in others:
            readers[other], pipes[other] = os.pipe()
            descriptors.callback(os.close, readers[other])
            lent.callback(os.close, pipes[other])
    except (OSError, AttributeError) as error:  # AttributeError: no Linux, no O_TMPFILE
        return Offer(_machine(), os.getpid(), error=f"no shared memory can be made in {folder} ({error})")
    return Offer(_machine(), os.getpid(), file, token, pipes)


def why_apart(offers: Sequence[Offer]) -> str:
    """Return why the ranks of these offers cannot share memory, as far as the offers say; empty if nothing speaks against it."""
    machines = sorted({each.machine for each in offers})
    if len(machines) > 1:
        return f"the ranks are on {len(machines)} machines, {', '.join(machine.split()[0] for machine in machines)}"
    return next((each.error for each in offers if each.error), "")


def open_file(offers: Sequence[Offer], rank: int, other: int, descriptors: ExitStack) -> int:
    """Open another rank's file of memory.

    Raises:
        SequenceParallelError: there is none, or it is not that rank's.
    """
    theirs = offers[other]
    path = f"/proc/{theirs.process}/fd/{theirs.file}"
    try:
        # Looked at first: in another container the number may be another process', and what it holds a device.
        if stat.S_ISREG(os.stat(path).st_mode):
            file = os.open(path, os.O_RDWR)
            descriptors.callback(os.close, file)
            if os.pread(file, _TOKEN_BYTES, 0) == theirs.token:
                return file
    except OSError as error:
        raise SequenceParallelError(f"rank {rank} cannot open the memory of rank {other} ({error})") from error
    raise SequenceParallelError(f"rank {rank} finds other things where rank {other} has its memory: containers?")


def open_pipe(offers: Sequence[Offer], rank: int, other: int, descriptors: ExitStack) -> int:
    """Open the pipe for this rank's signals to a rank whose file was opened.

    Raises:
        SequenceParallelError: it cannot be opened.
    """
    path = f"/proc/{offers[other].process}/fd/{offers[other].pipes[rank]}"
    try:
        pipe = os.open(path, os.O_WRONLY)
    except OSError as error:
        raise SequenceParallelError(f"rank {rank} cannot open the signals of rank {other} ({error})") from error
    descriptors.callback(os.close, pipe)
    return pipe


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = "unknown"
    return f"{socket.gethostname()} {boot}"
