"""PyTorch's memory-efficient operator for CUDA: float32, which its flash operator does not take. Its private names stand here alone.

Run on one kind of GPU: `select` takes it where `self_check` finds its numbers right.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_sp.attention.kernels.flash_layout import FlashKernel

# The operator's lse is as long as a multiple of this.
_LSE_ROWS = 32
# Of its masks: none; each query sees keys up to its own number.
_NO_MASK, _CAUSAL = 0, 1


class TorchEfficientKernel(FlashKernel):
    """PyTorch's memory-efficient operator: float32 on CUDA. Key-value heads are repeated for their queries, and their gradients added up."""

    name = "torch memory-efficient (cuda)"

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        group = q.shape[2] // k.shape[2]
        out, lse, *_ = _aten._efficient_attention_forward(
            q, _repeated(k, group), _repeated(v, group), None, None, None, q.shape[1], k.shape[1], 0.0,
            _CAUSAL if causal else _NO_MASK, True, scale=scale,
        )  # fmt: skip
        return out, lse[..., : q.shape[1]]

    def _backward(
        self, grad: Tensor, q: Tensor, out: Tensor, k: Tensor, v: Tensor, lse: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        group = q.shape[2] // k.shape[2]
        # Rows that are no query's weigh nothing: exp(s - inf) is 0.
        lse = F.pad(lse, (0, -lse.shape[-1] % _LSE_ROWS), value=math.inf)
        # Dropout is 0, so the operator reads no random state.
        seed = torch.zeros((), dtype=torch.int64, device=q.device)
        dq, dk, dv, _ = _aten._efficient_attention_backward(
            grad.contiguous(), q, _repeated(k, group), _repeated(v, group), None, out.contiguous(), None, None, q.shape[1], k.shape[1],
            lse.contiguous(), 0.0, seed, seed, _CAUSAL if causal else _NO_MASK, False, scale=scale,
        )  # fmt: skip
        return dq, _summed(dk, group), _summed(dv, group)


def _repeated(tensor: Tensor, group: int) -> Tensor:
    """Repeat each key-value head for its group of queries. Shapes: (B, T, K, D) -> (B, T, group K, D)."""
    return tensor if group == 1 else tensor.repeat_interleave(group, 2)


def _summed(gradient: Tensor, group: int) -> Tensor:
    """Undo `_repeated` for a gradient. Shapes: (B, T, group K, D) -> (B, T, K, D)."""
    return gradient if group == 1 else gradient.view(*gradient.shape[:2], -1, group, gradient.shape[-1]).sum(3)


_aten = torch.ops.aten
