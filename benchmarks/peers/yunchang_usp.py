"""yunchang (USP), patched: its torch kernel has no CPU operator and no backward, so both are put in here. Variants: ULYSSESxRING."""

from __future__ import annotations

from typing import Any

import torch
import yunchang.kernels
import yunchang.kernels.attention
from torch import Tensor
from yunchang import EXTRACT_FUNC_DICT, LongContextAttention, set_seq_parallel_pg
from yunchang.kernels import AttnType


def build(variant: str, problem: dict[str, Any], rank: int, world: int) -> Any:
    """Return (attend, shard)."""
    ulysses, ring = map(int, variant.split("x"))
    operators = torch.ops.aten
    yunchang.kernels.attention._scaled_dot_product_flash_attention = (
        operators._scaled_dot_product_flash_attention_for_cpu
    )

    def backward(*arguments: Any, **_: Any) -> None:
        grad, q, k, v, out, lse, dq, dk, dv, _dropout, scale, causal = arguments[:12]
        heads_first = (t.transpose(1, 2) for t in (grad, q, k, v, out))
        found = operators._scaled_dot_product_flash_attention_for_cpu_backward(
            *heads_first, lse, 0.0, causal, scale=scale
        )
        for target, source in zip((dq, dk, dv), found, strict=True):
            target.copy_(source.transpose(1, 2))

    yunchang.kernels.pytorch_attn_backward = backward
    set_seq_parallel_pg(ulysses, ring, rank, world)
    attention = LongContextAttention(ring_impl_type="zigzag", attn_type=AttnType.TORCH_FLASH)

    def shard(t: Tensor) -> Tensor:
        return EXTRACT_FUNC_DICT["zigzag"](t, rank, world_size=world, rd=ring, ud=ulysses)

    return lambda q, k, v: attention(q, k, v, causal=True), shard
