"""How much memory a rank may fill, and how much of it is in use: of the device, or on a CPU of the machine or its cgroup."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from pathlib import Path

import torch

# Of the whole. The rest is for what no prediction has: buffers of messages, kernels' workspaces, an allocator's gaps.
_USED = 0.9
# Where a container's limit stands: control groups of version 2, and of version 1.
_LIMITS = ("memory.max", "memory/memory.limit_in_bytes")


def budget_bytes(device: torch.device, ranks_on_machine: int, root: Path = Path("/")) -> int:
    """Return nine tenths of a device's memory; on a CPU of a rank's share of the machine's, or of its control group's limit.

    Args:
        device: of this rank.
        ranks_on_machine: that share the memory of a CPU.
        root: where `/proc` and `/sys` are.
    """
    if device.type == "cuda":
        return int(_USED * torch.cuda.mem_get_info(device)[1])
    return int(_USED * _machine_bytes(root) / ranks_on_machine)


def used_bytes(device: torch.device) -> int:
    """Return what a rank has of its device's memory now; on a CPU all that is resident, where the system tells it.

    What was freed on a CPU, by a preflight or a run before, is given back first: glibc keeps it resident, and the step will fill it again.
    """
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0


def _machine_bytes(root: Path) -> int:
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return 2**62  # a system that does not tell
    limits = [_read(root / "sys/fs/cgroup" / group / name) for name in _LIMITS for group in ("", _own_group(root))]
    return min([total, *filter(None, limits)])


def _own_group(root: Path) -> str:
    """Return this process' control group of version 2, where it is not the root of what it sees."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return ""
    return next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")


def _read(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None  # no such file, or "max"
