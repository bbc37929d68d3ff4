"""What a part of the kit is: cases by name, each of which gives a row of a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

Row = dict[str, Any]
# The name of a case, and what measures it.
Case = tuple[str, Callable[[], Row]]


@dataclass(frozen=True)
class Setting:
    """Where the kit runs.

    Args:
        device: "cuda", or "cpu" to see that the kit itself works.
        tiny: sizes of seconds, not of minutes.
        words: only cases whose name has one of these; none: all.
    """

    device: str
    tiny: bool
    words: tuple[str, ...] = ()

    def asks_for(self, case: str) -> bool:
        """Return whether a case was asked for."""
        return not self.words or any(word in case for word in self.words)

    @property
    def device_name(self) -> str:
        """Return the name that NVIDIA gives the device; of a CPU how many threads torch has."""
        return torch.cuda.get_device_name() if self.device == "cuda" else f"cpu, {torch.get_num_threads()} threads"

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of speed: bfloat16 on GPUs; float32 on a CPU, whose bfloat16 takes its time."""
        return torch.bfloat16 if self.device == "cuda" else torch.float32

    def wait(self) -> None:
        """Wait for the device."""
        if self.device == "cuda":
            torch.cuda.synchronize()


@dataclass(frozen=True)
class Part:
    """One table.

    Args:
        about: what it measures, a line.
        limit_s: of its process.
        cases: in the order of their value; nothing is computed before a case is asked for.
    """

    about: str
    limit_s: int
    cases: Callable[[Setting], Iterator[Case]]
