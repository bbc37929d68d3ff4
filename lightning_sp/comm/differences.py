"""What ranks have by name and must have alike: as one number to compare, and in which of it they differ, in words."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

# What a message shows of many that differ.
_SHOWN = 3


def digest_of(options: Mapping[str, Any]) -> int:
    """Return a number of 56 bits that tells plain values by name, the same in every process."""
    text = repr(sorted(options.items())).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")


def told_differences(of_ranks: Sequence[Mapping[str, Any]]) -> str:
    """Return which names have other values on some ranks, with the value of each rank; empty for none.

    Args:
        of_ranks: plain values by name; a text is shown as it is.
    """
    lines = []
    for name in dict.fromkeys(name for each in of_ranks for name in each):
        ranks: dict[str, list[int]] = {}
        for rank, each in enumerate(of_ranks):
            value = each.get(name, "not given")
            ranks.setdefault(value if isinstance(value, str) else repr(value), []).append(rank)
        if len(ranks) > 1:
            shown = "; ".join(f"{value} on rank {', '.join(map(str, holders))}" for value, holders in ranks.items())
            lines.append(f"{name} is {shown}")
    more = f", and {len(lines) - _SHOWN} others" if len(lines) > _SHOWN else ""
    return f"{'; '.join(lines[:_SHOWN])}{more}"
