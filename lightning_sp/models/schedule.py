"""The learning rate's schedule: linear warmup, then half a cosine."""

from __future__ import annotations

import math
from collections.abc import Callable


def warmup_cosine(*, warmup_steps: int, max_steps: int, min_ratio: float) -> Callable[[int], float]:
    """Return the learning rate's factor by step: linear warmup, then half a cosine down to ``min_ratio``."""

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        progress = min(1.0, (step - warmup_steps) / max(1, max_steps - warmup_steps))
        return min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * progress))

    return factor
