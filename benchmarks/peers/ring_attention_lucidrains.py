"""lucidrains' ring-attention-pytorch, patched: without it dK and dV are a tuple's. Variants: ring (consecutive tokens), striped.

Its zig-zag form drops the gradients of remote keys, its fused kernel is Triton's: this is its own in plain torch.
"""

from __future__ import annotations

from typing import Any

from ring_attention_pytorch.ring_flash_attention import ring_flash_attn
from torch import Tensor

from benchmarks.peers.worker import contiguous

# The package's default; stripes need the whole shard as one.
BUCKET = 1024


def build(variant: str, problem: dict[str, Any], rank: int, world: int) -> Any:
    """Return (attend, shard)."""
    striped = variant == "striped"
    tokens = problem["length"] // world
    bucket = tokens if striped else min(BUCKET, tokens)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return ring_flash_attn(
            q, k, v, causal=True, bucket_size=bucket, ring_reduce_col=True, striped_ring_attn=striped, ring_size=world
        )

    def stripes(t: Tensor) -> Tensor:
        return t[:, rank::world]

    return attend, stripes if striped else contiguous(rank, world)
