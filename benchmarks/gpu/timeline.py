"""When a device worked, and what the host did while it did not: from the spans of a profile."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

# What a host waits in: CUDA's own calls, and torch's that end in one.
WAITS = (
    "cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaStreamWaitValue", "aten::item", "aten::_local_scalar_dense",
    "aten::nonzero", "aten::equal", "aten::is_nonzero",
)  # fmt: skip


@dataclass(frozen=True, order=True)
class Span:
    """Something that began and ended, in microseconds."""

    begin: float
    end: float
    name: str


@dataclass(frozen=True)
class Gap:
    """A time in which no kernel ran, and the innermost wait of the host that overlaps it; "" for none."""

    begin: float
    end: float
    wait: str


def busy_us(kernels: Iterable[Span]) -> float:
    """Return how long at least one kernel ran."""
    return sum(end - begin for begin, end in _merged(kernels))


def gaps(kernels: Sequence[Span], host: Sequence[Span], least_us: float) -> list[Gap]:
    """Return the times between the first and the last kernel in which none ran, the longest first.

    Args:
        kernels: of all streams.
        host: what the host called.
        least_us: shorter ones are left out.
    """
    merged = _merged(kernels)
    waits = sorted((span for span in host if span.name in WAITS), key=lambda span: span.end - span.begin)
    found = []
    for (_, end), (begin, _) in itertools.pairwise(merged):
        if begin - end >= least_us:
            # A wait that ends in the gap is what held the host back from launching.
            inside = (span.name for span in waits if span.begin < begin and end < span.end)
            found.append(Gap(end, begin, next(inside, "")))
    return sorted(found, key=lambda gap: gap.begin - gap.end)


def spans(events: Iterable[Any], *, of_device: bool) -> list[Span]:
    """Return the spans of a torch profile's events: of the device's kernels, or of the host's calls.

    A range that code has marked (`record_function`, FSDP's) has a span on the device too, with the gaps between its kernels.
    """
    return sorted(
        Span(event.time_range.start, event.time_range.end, event.name)
        for event in events
        if (event.device_type.name != "CPU") == of_device and not (of_device and event.is_user_annotation)
    )


def _merged(kernels: Iterable[Span]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for span in sorted(kernels):
        if merged and span.begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], span.end)
        else:
            merged.append((span.begin, span.end))
    return merged


def longest(kernels: Sequence[Span], count: int) -> list[tuple[str, float]]:
    """Return the kernels that took most time, all calls of a name together: (the name without its templates' arguments, microseconds)."""
    total: Counter[str] = Counter()
    for each in kernels:
        total[re.sub(r"<.*", "", each.name.removeprefix("void "))[:60] + _functor(each.name)] += each.end - each.begin
    return total.most_common(count)


def _functor(name: str) -> str:
    """Return what an elementwise kernel of torch computes, which only its templates' arguments say."""
    found = re.search(r"(\w+)(?:_kernel_impl|Functor|_kernel_cuda)\b", name.partition("<")[2])
    return f" ({found.group(1)})" if found else ""
