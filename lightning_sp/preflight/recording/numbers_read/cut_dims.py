"""Which dims an index cuts by a number of Python's that is beyond them, or zero: `x[:, :1000]` of a part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor


def lengths_not_cut(shape: Sequence[int], index: Any) -> list[int]:
    """Return the lengths of the dims of which an index takes all or nothing by a number that is not made of them: `x[:, :1000]`. Pure.

    Args:
        shape: of what is indexed.
        index: of it, as Python has it.
    """
    parts = list(index) if isinstance(index, tuple) else [index]
    parts = [each for each in parts if each is not None]
    if any(each is Ellipsis for each in parts):
        at = next(i for i, each in enumerate(parts) if each is Ellipsis)
        parts[at : at + 1] = [slice(None)] * (len(shape) - len(parts) + 1)
    if any(isinstance(each, Tensor) for each in parts):
        return []  # one of more dims, say
    return [size for size, each in zip(shape, parts, strict=False) if isinstance(each, slice) and _cuts_not(size, each)]


def _cuts_not(size: int, part: slice) -> bool:
    start: Any = part.start
    stop: Any = part.stop
    if start is None and isinstance(stop, (int, np.integer)):
        return bool(stop > size or stop == 0)
    # With both, a loop over pieces of a length: it takes them all.
    return stop is None and isinstance(start, (int, np.integer)) and bool(start == 0 or abs(int(start)) > size)
