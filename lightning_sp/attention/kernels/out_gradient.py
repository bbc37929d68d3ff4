"""What a backward needs of out: one number for each query and head, not out itself.

    delta_i = sum_d dO_id O_id,   dS_ij = P_ij (dO_i . V_j - delta_i)

Kernels compute delta from the out that they are given, and read out for nothing else. So the rank of the tokens, which has out anyway, computes
delta; the rank of the heads gets it with dO, and gives its kernel the vector along dO that has the same product with it:

    O'_i = dO_i delta_i / |dO_i|^2,   dO_i . O'_i = delta_i,   |O'_i| <= |O_i|

O' is no larger than O, so its rounding to 16 bits moves delta no more than that of O does. Where dO_i is 0, delta_i is 0, and O'_i too.
Source: delta is FlashAttention-2's D, arXiv:2307.08691, algorithm 2, line 4.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_sp.attention.spec.accumulator import accumulator_dtype
from lightning_sp.devices import is_accelerator

# Elements that are computed at a time: what is between the lines below is in the accumulator's dtype, and not all of it should be. A core's
# cache holds a million; a device's kernel of so few ends before the next one is begun.
_AT_A_TIME, _ON_DEVICE = 2**20, 2**24


def delta_of(grad: Tensor, out: Tensor) -> Tensor:
    """Return delta in the accumulator's dtype. Shapes: (B, H, S, D) twice -> (B, H, S)."""
    parts = _parts(grad)
    # Of this dtype the products are, without a copy of either factor.
    zero = grad.new_zeros(1, 1, 1, 1, dtype=accumulator_dtype(grad.dtype))
    delta = grad.new_empty(grad.shape[:3], dtype=zero.dtype)
    for g, o, part in zip(grad.chunk(parts, 2), out.chunk(parts, 2), delta.chunk(parts, 2), strict=True):
        torch.sum(torch.addcmul(zero, g, o), -1, out=part)
    return delta


def out_along_gradient(grad: Tensor, delta: Tensor) -> Tensor:
    """Return O' in the dtype of the gradient. Shapes: (B, H, S, D), (B, H, S) -> (B, H, S, D)."""
    made, parts, tiny = torch.empty_like(grad), _parts(grad), torch.finfo(delta.dtype).tiny
    for g, d, part in zip(grad.chunk(parts, 2), delta.chunk(parts, 2), made.chunk(parts, 2), strict=True):
        # Of a gradient of 1e-30 the square would be 0.
        largest = torch.linalg.vector_norm(g, torch.inf, -1, keepdim=True).to(delta.dtype).clamp_min(tiny)
        unit = g / largest
        squares = unit.square().sum(-1, keepdim=True).clamp_min(1)
        torch.mul(unit, d.unsqueeze(-1) / largest / squares, out=part)
    return made


def _parts(tensor: Tensor) -> int:
    at_a_time = _ON_DEVICE if is_accelerator(tensor.device) else _AT_A_TIME
    return max(1, min(tensor.shape[2], tensor.numel() // at_a_time))
