"""How much memory of the host this process may still use."""

from __future__ import annotations

from pathlib import Path

_GROUP = Path("/sys/fs/cgroup")


def available_bytes() -> int | None:
    """Return the host's available memory, or what is left of a container's if that is less; None where the system does not say."""
    found = [each for each in (_of_host(), _of_container()) if each is not None]
    return min(found, default=None)


def _of_host() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _of_container() -> int | None:
    """Return what a memory limit leaves, where there is one. Source: Linux, admin-guide/cgroup-v2, "Memory Interface Files"."""
    try:
        limit = (_GROUP / "memory.max").read_text().strip()
        used = int((_GROUP / "memory.current").read_text())
        # Files in the cache give way.
        stat = dict(line.split() for line in (_GROUP / "memory.stat").read_text().splitlines())
        return None if limit == "max" else int(limit) - used + int(stat.get("inactive_file", 0))
    except (OSError, ValueError):
        return None
