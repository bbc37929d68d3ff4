"""PyTorch's own context parallelism: its ring's core with the CPU operator, for its public entry fails there. Variants: allgather, alltoall."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.experimental._attention import set_rotate_method
from torch.distributed.tensor.experimental._context_parallel import _attention

from benchmarks.peers.worker import zigzag


def build(variant: str, problem: dict[str, Any], rank: int, world: int) -> Any:
    """Return (attend, shard)."""
    set_rotate_method(variant)
    _attention._cp_options.enable_load_balance = True
    group = dist.group.WORLD
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

    class Ring(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out, lse = _attention._templated_ring_attention(group, 2, forward, q, k, v, is_causal=True)
            ctx.save_for_backward(q, k, v, out, lse)
            return out

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            q, k, v, out, lse = ctx.saved_tensors
            return _attention._templated_ring_attention_backward(
                group, 2, backward, grad_out=grad, grad_out_name="grad_out", query=q, key=k, value=v, out=out, logsumexp=lse,
                is_causal=True, dropout_p=0.0,
            )  # fmt: skip

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return Ring.apply(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2)

    return attend, zigzag(rank, world)
