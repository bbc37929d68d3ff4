"""One local kernel call -> (out, lse), and its backward from a GLOBAL (out, lse).

Layout here is (B, H, S, D) with any strides, D contiguous; lse is (B, H, S), natural logarithm, float32 (float64 for float64). Keys and
values may have fewer heads (GQA). `causal` blocks are always square, so top-left (CPU) and bottom-right (CUDA) alignment agree.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from lightning_sp.attention.spec.positions import ScorePositions


class Kernel(Protocol):
    """What every local kernel offers; `positions` is read by those that change scores by where they lie."""

    name: str

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, positions: ScorePositions | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return (out, lse) of one block; shapes (B, H, S, D), (B, H, S)."""
        ...

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool, scale: float,
        positions: ScorePositions | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return (dq, dk, dv) of one block from the global out and lse."""
        ...
