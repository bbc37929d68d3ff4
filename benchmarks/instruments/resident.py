"""Peak memory of this process over a block, from Linux' own count of resident pages: every allocation counts, torch's or not."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

M_MMAP_THRESHOLD = -3  # malloc.h


@dataclass
class Growth:
    """The peak above what was resident at the block's begin, of the whole and of each part that was begun in it; valid after the block."""

    peak_bytes: int = 0
    parts: dict[str, int] = field(default_factory=dict)
    _part: str = "rest"

    def begin_part(self, name: str) -> None:
        """End the part before, "rest" at first, and begin or go on with another."""
        self.end_part()
        self._part = name

    def end_part(self) -> None:
        """Keep the peak of the part that ends, and have the kernel forget it."""
        self.parts[self._part] = max(self.parts.get(self._part, 0), _kept_bytes("status", "VmHWM"))
        forget_peak()


def map_tensors() -> None:
    """Map every tensor of 1 MiB and more straight from the system from now on, so that resident means alive.

    Call it before a process makes its first large tensor. A heap that has grown before serves later ones from its free parts, wherever they
    fit, and keeps each page that was touched once: in steps of one model the peak was up to three times what was alive.
    """
    ctypes.CDLL("libc.so.6").mallopt(M_MMAP_THRESHOLD, 2**20)


@contextlib.contextmanager
def peak_growth() -> Iterator[Growth]:
    """Measure how far the process' resident memory rises in the block. Where tensors were made before, `map_tensors` came before them."""
    growth = Growth()
    gc.collect()
    # Memory that is free but kept by the allocator would serve the block and hide what it needs: give it back.
    map_tensors()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    forget_peak()
    begin, shared, own = _kept_bytes("status", "VmRSS"), *_shared_bytes()
    yield growth
    shared_end, own_end = _shared_bytes()
    # A page that four processes map is resident in each: of what is shared a process' share counts, so that the sum over ranks is what
    # the machine holds. Shared memory stays mapped, so what is there in the end is what was there at the peak.
    growth.end_part()
    below = begin + (shared_end - shared) - (own_end - own)
    growth.parts = {name: peak - below for name, peak in growth.parts.items()}
    growth.peak_bytes = max(growth.parts.values())


def forget_peak() -> None:
    """Have the kernel begin a new peak with what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def resident_bytes() -> int:
    """Return what is resident now, of memory shared with other processes this one's share."""
    shared, own = _shared_bytes()
    return _kept_bytes("status", "VmRSS") - shared + own


def _shared_bytes() -> tuple[int, int]:
    """Return the resident shared memory of this process, and its share of it: a page that n processes map counts 1/n."""
    return _kept_bytes("status", "RssShmem"), _kept_bytes("smaps_rollup", "Pss_Shmem")


def _kept_bytes(file: str, name: str) -> int:
    for line in Path("/proc/self", file).read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/{file} has no {name}")
