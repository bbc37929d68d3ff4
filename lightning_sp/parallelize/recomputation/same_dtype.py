"""What a recomputation needs of its forward beside what torch's checkpoint restores (autocast, the random state)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def in_the_same_dtype(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose recomputation makes tensors in the default dtype of its forward.

    Lightning's true precisions ("64-true", "bf16-true") set the default dtype in a forward alone, and a block is recomputed in the backward:
    its `torch.zeros(n)` would be float32 there, which torch's checkpoint refuses.

    Args:
        forward: to be recomputed.
    """
    dtype = torch.get_default_dtype()

    def run(*args: Any, **kwargs: Any) -> Any:
        other = torch.get_default_dtype()
        if other == dtype:
            return forward(*args, **kwargs)
        torch.set_default_dtype(dtype)
        try:
            return forward(*args, **kwargs)
        finally:
            torch.set_default_dtype(other)

    return run
