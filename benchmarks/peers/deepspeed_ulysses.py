"""DeepSpeed's DistributedAttention around torch's attention, as it is."""

from __future__ import annotations

from typing import Any

import deepspeed.comm
import torch.nn.functional as F
from deepspeed.sequence.layer import DistributedAttention
from torch import Tensor

from benchmarks.peers.worker import contiguous


def build(variant: str, problem: dict[str, Any], rank: int, world: int) -> Any:
    """Return (attend, shard)."""
    deepspeed.comm.init_distributed(dist_backend="gloo", dist_init_required=False)
    group = deepspeed.comm.new_group(list(range(world)))

    def inner(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        gqa = q.shape[2] != k.shape[2]
        out = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True, enable_gqa=gqa)
        return out.transpose(1, 2).contiguous()

    attention = DistributedAttention(inner, group, scatter_idx=2, gather_idx=1)
    return lambda q, k, v: attention(q, k, v, 0), contiguous(rank, world)
