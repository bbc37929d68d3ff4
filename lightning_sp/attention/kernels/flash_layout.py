"""What flash kernels on CUDA compute on: (B, S, H, D), a padded head dim, and backwards small enough for their 32-bit offsets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_sp.attention.spec.accumulator import accumulator_dtype
from lightning_sp.attention.spec.positions import ScorePositions

MAX_FLASH_HEAD_DIM = 256

# Queries that a flash kernel's sums are rounded up to, and how many elements of them int32 can number.
FLASH_ROWS = 128
_FLASH_ELEMENTS = 2**31


class FlashKernel(ABC):
    """A flash kernel for CUDA: a base that turns blocks of (B, H, S, D) into its two calls, on (B, S, H, D) with D a multiple of 8."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, positions: ScorePositions | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return (out, lse) of one block."""
        out, lse = self._forward(to_bshd(q), to_bshd(k), to_bshd(v), causal=causal, scale=scale)
        return to_bhsd(out, q.shape[-1]), lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool, scale: float,
        positions: ScorePositions | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return (dq, dk, dv) of one block from the global out and lse."""
        one = partial(self._backward_bhsd, causal=causal, scale=scale)
        return by_heads(one, accumulator_rows(q), (grad, q, out), (k, v), lse, 1)

    def _backward_bhsd(
        self, grad: Tensor, q: Tensor, out: Tensor, k: Tensor, v: Tensor, lse: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        dim = q.shape[-1]
        grad, q, out, k, v = (to_bshd(t) for t in (grad, q, out, k, v))
        dq, dk, dv = self._backward(grad, q, out, k, v, lse, causal=causal, scale=scale)
        return to_bhsd(dq, dim), to_bhsd(dk, dim), to_bhsd(dv, dim)

    @abstractmethod
    def _forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """Return (out, lse). Shapes: (B, S, H, D), (B, T, K, D) twice -> (B, S, H, D), (B, H, S)."""

    @abstractmethod
    def _backward(
        self, grad: Tensor, q: Tensor, out: Tensor, k: Tensor, v: Tensor, lse: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq, dk, dv). Shapes: as `_forward`'s."""


def by_heads(
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]], rows: int, of_queries: Sequence[Tensor], of_keys: Sequence[Tensor],
    lse: Tensor, lse_dim: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return (dq, dk, dv) of a flash kernel's backward: in one call, or where its int32 offsets would not do, in one for each key-value head.

    FlashAttention 2 up to 2.7 numbers the elements of its float32 sums of dQ, rows x heads x head dim, by 32 bits: beyond 2^31 of them,
    1M tokens of 32 heads of 128, it would write somewhere else.

    Args:
        backward: (*of_queries, *of_keys, lse) -> (dq, dk, dv), all but lse with heads in dim 1.
        rows: of those sums.
        of_queries: the gradient of out, q, out.
        of_keys: k and v.
        lse: of the query heads.
        lse_dim: its dimension of heads.
    """
    heads, kv_heads, dim = of_queries[0].shape[1], of_keys[0].shape[1], of_queries[0].shape[-1]
    rounded = -(-dim // 32) * 32 if dim <= 192 else MAX_FLASH_HEAD_DIM
    most, group = max(1, _FLASH_ELEMENTS // (rows * rounded)), heads // kv_heads
    if heads <= most:
        return backward(*of_queries, *of_keys, lse)
    dq = torch.empty_like(of_queries[1])
    dk, dv = (torch.zeros_like(t, dtype=accumulator_dtype(t.dtype)) for t in of_keys)
    for shared in range(kv_heads):
        end = (shared + 1) * group
        for start in range(shared * group, end, most):
            own = min(most, end - start)
            parts = [t.narrow(1, start, own) for t in of_queries] + [t.narrow(1, shared, 1) for t in of_keys]
            dq_part, dk_part, dv_part = backward(*parts, lse.narrow(lse_dim, start, own))
            dq.narrow(1, start, own).copy_(dq_part)
            dk.narrow(1, shared, 1).add_(dk_part)
            dv.narrow(1, shared, 1).add_(dv_part)
    return dq, dk.to(of_keys[0].dtype), dv.to(of_keys[1].dtype)


def accumulator_rows(q: Tensor) -> int:
    """Return the rows of a flash kernel's sums of dQ. Shapes: (B, H, S, D) -> ()."""
    return q.shape[0] * -(-q.shape[2] // FLASH_ROWS) * FLASH_ROWS


def to_bshd(tensor: Tensor) -> Tensor:
    """Return what the flash kernels compute on: (B, H, S, D) -> (B, S, H, D), D padded with zeros to a multiple of 8."""
    return pad_head_dim(tensor.transpose(1, 2))


def pad_head_dim(tensor: Tensor) -> Tensor:
    """Pad the last dimension with zeros to a multiple of 8."""
    missing = -tensor.shape[-1] % 8
    return F.pad(tensor, (0, missing)) if missing else tensor


def to_bhsd(tensor: Tensor, dim: int) -> Tensor:
    """Undo `to_bshd`: (B, S, H, padded D) -> (B, H, S, D)."""
    return tensor[..., :dim].transpose(1, 2)
