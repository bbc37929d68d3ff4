"""Whether a ring takes its keys hop by hop or all at once."""

from __future__ import annotations

from torch import Tensor

from lightning_sp.attention.ring import Ring


def gathers(method: str, ring: Ring, q: Tensor, k: Tensor) -> bool:
    """Return whether all keys come first, the same on all ranks of the ring."""
    return ring.size > 1 and method == "all_gather"
