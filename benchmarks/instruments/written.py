"""What this process has written, by the kernel's own count: on ranks without files, what left by its sockets, whoever sent it."""

from __future__ import annotations


def written_bytes() -> int:
    """Return what this process has written since it began."""
    with open("/proc/self/io") as counters:
        return next(int(line.split()[1]) for line in counters if line.startswith("wchar"))
