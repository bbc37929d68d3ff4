"""Seconds that Python takes in a package's own lines, by cProfile, without what the profiler and torch take of them.

A profiler adds to each call, which is most of what a line of Python costs. And it tells torch's functions from the line that calls them only
where they are named (`torch.cat`), not behind an operator or an index (`heads[:, :4]`).
"""

from __future__ import annotations

import cProfile
import pstats
import statistics
import timeit
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

_DEVICE = ("inner", "_compile.py")  # torch's, around a simulated device's __torch_dispatch__
_TIMES = 20_000


class ProfilerCosts(NamedTuple):
    """Seconds that a profile holds too much of one call.

    Args:
        calling: in the caller of a function.
        called: in the function.
        calling_builtin: in the caller of a function that is not of Python.
        builtin_called: in that one.
        index: in a line that indexes a tensor, for each operator that a simulated device is given by it: all but the device's own lines.
    """

    calling: float
    called: float
    calling_builtin: float
    builtin_called: float
    index: float = 0.0


def own_seconds(
    profiles: Sequence[cProfile.Profile], is_own: Callable[[str], bool], costs: ProfilerCosts
) -> dict[str, float]:
    """Return the seconds of a step in each function and in Python's own functions that it calls: the median of the steps.

    Args:
        profiles: one of each step.
        is_own: says of a file whether its lines count.
        costs: of this machine's profiler.
    """
    steps: dict[str, list[float]] = defaultdict(list)
    for profile in profiles:
        step: Counter[str] = Counter()
        for (file, line, name), (_, calls, own, _, callers) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
            builtin, is_device = file == "~", (name, file.rpartition("/")[2]) == _DEVICE
            if is_own(file):
                step[_place(file, line, name)] += own - calls * costs.called
            for (caller, caller_line, caller_name), (_, n, seconds, _) in callers.items():
                if not is_own(caller):
                    continue
                if builtin and "torch" not in name:
                    step[name] += seconds - n * costs.builtin_called
                cost = costs.index if is_device else costs.calling_builtin if builtin else costs.calling
                step[_place(caller, caller_line, caller_name)] -= n * cost
        for where, seconds in step.items():
            steps[where].append(seconds)
    of_all = {where: [*seconds, *[0.0] * (len(profiles) - len(seconds))] for where, seconds in steps.items()}
    return {where: max(0.0, statistics.median(seconds)) for where, seconds in of_all.items()}


def _place(file: str, line: int, name: str) -> str:
    return f"{file.rpartition('/lightning_sp/')[2]}:{line} {name}"


def profiler_costs(on_device: Callable[[], Tensor] | None = None) -> ProfilerCosts:
    """Measure what this machine's profiler takes.

    Args:
        on_device: makes a tensor of a simulated device, (2, 4); None where none is.
    """

    def nothing() -> None: ...

    def loop() -> None:
        for _ in range(_TIMES):
            pass

    def calls() -> None:
        for _ in range(_TIMES):
            nothing()

    def builtins() -> None:
        for _ in range(_TIMES):
            len(())

    def indices(tensor: Tensor) -> None:
        for _ in range(_TIMES // 100):
            tensor[:, 1:2]

    def seconds(function: Callable[[], None]) -> float:
        return min(timeit.repeat(function, number=1, repeat=5)) / _TIMES

    in_calls, in_builtins = _profiled(calls), _profiled(builtins)
    called, empty, index = in_calls["nothing"][1] / _TIMES, seconds(loop), 0.0
    if on_device is not None:
        in_indices = _profiled(indices, on_device())
        index = in_indices["indices"][1] / in_indices[_DEVICE[0]][0]
    return ProfilerCosts(
        calling=in_calls["calls"][1] / _TIMES - empty - max(0.0, seconds(calls) - empty - called),
        called=called,
        calling_builtin=in_builtins["builtins"][1] / _TIMES - empty,
        builtin_called=in_builtins["<built-in method builtins.len>"][1] / _TIMES,
        index=index,
    )


def _profiled(function: Callable[..., None], *given: Any) -> dict[str, tuple[int, float]]:
    """Return the calls and the seconds of each function."""
    profile = cProfile.Profile()
    profile.runcall(function, *given)
    stats = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    return {name: (n, own) for (_, _, name), (_, n, own, _, _) in stats.items()}
