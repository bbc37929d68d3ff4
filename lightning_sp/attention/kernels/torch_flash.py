"""PyTorch's own flash operators, for the CPU and for CUDA. Their private names stand here alone."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from lightning_sp.attention.kernels.flash_layout import (
    FLASH_ROWS,
    FlashKernel,
    by_heads,
    pad_head_dim,
)
from lightning_sp.attention.kernels.varlen import Segments
from lightning_sp.attention.spec.positions import ScorePositions


class TorchCpuKernel:
    """PyTorch's own flash operator for the CPU: float32, float64, bfloat16, float16; GQA without a copy."""

    name = "torch flash (cpu)"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, positions: ScorePositions | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return (out, lse) of one block."""
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool, scale: float,
        positions: ScorePositions | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return (dq, dk, dv) of one block from the global out and lse."""
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal, scale=scale
        )
        return dq, dk, dv


class TorchCudaKernel(FlashKernel):
    """PyTorch's own flash operator for CUDA (compute capability 8.0 and newer): bfloat16 and float16, GQA without a copy.

    Its head dim is a multiple of 8, up to 256: others are padded with zeros here, which changes no score and no gradient.
    `torch.nn.attention.activate_flash_attention_impl("FA3" | "FA4")` swaps the code behind the same operator. torch 2.11 to 2.13 expect two
    values of flash-attn-4, which returns four from 4.0.0b19 on: "FA4" needs an older one there.
    """

    name = "torch flash (cuda)"

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        out, lse, *_ = _aten._flash_attention_forward(
            q, k, v, None, None, q.shape[1], k.shape[1], 0.0, causal, False, scale=scale
        )
        return out, lse

    def _backward(
        self, grad: Tensor, q: Tensor, out: Tensor, k: Tensor, v: Tensor, lse: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        # Dropout is 0, so the kernel reads no random state. No cum_seq: the dense form, in which the operator wants None.
        rng = torch.empty(2, dtype=torch.uint64, device=q.device)
        dq, dk, dv = _aten._flash_attention_backward(
            grad.contiguous(), q, k, v, out.contiguous(), lse.contiguous(), None, None,
            q.shape[1], k.shape[1], 0.0, causal, rng, torch.empty((), dtype=torch.uint64, device=q.device), scale=scale,
        )  # fmt: skip
        return dq, dk, dv

    def forward_packed(
        self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Return (out, lse) of many blocks, one after the other; shapes (T, H, D), (H, T)."""
        dim = q.shape[-1]
        q, k, v = (pad_head_dim(t) for t in (q, k, v))
        out, lse, *_ = _aten._flash_attention_forward(
            q,
            k,
            v,
            segments.queries,
            segments.keys,
            segments.max_queries,
            segments.max_keys,
            0.0,
            causal,
            False,
            scale=scale,
        )
        return out[..., :dim], lse

    def backward_packed(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: Segments, *,
        causal: bool, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return (dq, dk, dv) of many blocks from the global out and lse."""
        rows = q.shape[0] + FLASH_ROWS * len(segments.queries)
        one = partial(self._backward_packed, segments=segments, causal=causal, scale=scale)
        return by_heads(one, rows, (grad, q, out), (k, v), lse, 0)

    def _backward_packed(
        self, grad: Tensor, q: Tensor, out: Tensor, k: Tensor, v: Tensor, lse: Tensor, *, segments: Segments,
        causal: bool, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        dim = q.shape[-1]
        grad, q, k, v, out = (pad_head_dim(t) for t in (grad, q, k, v, out))
        rng = torch.empty(2, dtype=torch.uint64, device=q.device)
        dq, dk, dv = _aten._flash_attention_backward(
            grad.contiguous(), q, k, v, out.contiguous(), lse.contiguous(), segments.queries, segments.keys,
            segments.max_queries, segments.max_keys, 0.0, causal, rng, torch.empty((), dtype=torch.uint64, device=q.device),
            scale=scale,
        )  # fmt: skip
        return dq[..., :dim], dk[..., :dim], dv[..., :dim]


_aten = torch.ops.aten
