"""Attention sinks: one more key for each head, with a learned score and no value, that takes weight from the others.

    lse' = log(exp(lse) + exp(sink)),   out' = out exp(lse - lse'),   dsink = - sum over queries of exp(sink - lse') (dO . out')

From (out, lse) of the whole key set alone, so that any kernel serves, and its backward from (out', lse') as it is. Source: GPT-OSS model card,
arXiv:2508.10925, section 2.
"""

from __future__ import annotations

import torch
from torch import Tensor


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Return (out', lse'). A query that saw no key gives its whole weight to the sink.

    Shapes: (B, H, S, D), (B, H, S), (H,) -> (B, H, S, D), (B, H, S).
    """
    whole = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    return out.to(whole.dtype) * _share(lse, whole).unsqueeze(-1), whole


def sink_gradient(sinks: Tensor, grad: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """Return the gradient of the sinks from these queries, (H,).

    Shapes: sinks (H,), grad and out (B, H, S, D), lse (B, H, S), out and lse those with the sinks.
    """
    delta = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    return -(_share(sinks.to(lse.dtype)[:, None], lse) * delta).sum((0, 2)).to(sinks.dtype)


def _share(part: Tensor, whole: Tensor) -> Tensor:
    """Return exp(part - whole); 0 where both are -inf: a query that saw nothing, and a sink that takes nothing."""
    return torch.exp((part - whole).nan_to_num_(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf))
