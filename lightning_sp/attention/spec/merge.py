"""Merging partial attention: (out, lse) of disjoint key sets into that of their union.

    lse = log(exp(lse_1) + exp(lse_2)),   out = (exp(lse_1) out_1 + exp(lse_2) out_2) / exp(lse) = lerp(out_1, out_2, sigmoid(lse_2 - lse_1))

Source: FlashAttention-2, arXiv:2307.08691, section 3.1.3 (split keys); the sigmoid form needs one pass over `out`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which partials are accumulated: never below float32."""
    return torch.promote_types(dtype, torch.float32)


def merge_into(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Merge a block's partial into the running (out, lse), in place; a row that has seen no key has 0 and -inf.

    Shapes: out, block_out (B, H, S, D); lse, block_lse (B, H, S), natural logarithm.
    """
    # Where neither has seen a key, -inf - -inf is not a number: the running partial stays.
    weight = torch.sigmoid(
        (block_lse - lse).nan_to_num_(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    ).unsqueeze(-1)
    out.lerp_(block_out.to(out.dtype), weight.to(out.dtype).expand_as(out))
    torch.logaddexp(lse, block_lse, out=lse)
