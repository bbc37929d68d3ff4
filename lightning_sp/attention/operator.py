"""The attention as one `torch.library` operator: ulysses(ring(block)), its communication inside.

One operator already in eager code, so that a selective checkpoint policy can save it whole and the recomputation never repeats a kernel or a
collective; opaque to torch.compile. It returns all that the backward needs as outputs, for what is not an output a policy cannot save.
An axis of size 1 has the empty group name and its step vanishes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_sp import comm
from lightning_sp.attention.block import BlockKernel, empty_token_major
from lightning_sp.attention.kernel import select_kernel
from lightning_sp.attention.mask import AttentionMask
from lightning_sp.attention.plan import plan_of
from lightning_sp.attention.ring import Ring, ring_backward, ring_forward
from lightning_sp.attention.sinks import sink_gradient
from lightning_sp.attention.ulysses import (
    HeadSplit,
    exchange_out,
    exchange_out_grad,
    exchange_qkv,
    exchange_qkv_grad,
    split_qkv,
)
from lightning_sp.layout import SequenceLayout


@torch.library.custom_op("lightning_sp::attention", mutates_args=())
def attention_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask_numbers: list[int],
    mask_tensors: list[Tensor],
    layout_table: Tensor | None,
    sinks: Tensor | None,
    softcap: float,
    scale: float,
    ring_group: str,
    ulysses_group: str,
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Attend over the whole sequence from this rank's part of it.

    Shapes: q (B, H, s, D), k and v (B, K, s, D) -> out (B, H, s, D), lse (B, h, S), and with Ulysses the exchanged
    q, k, v (S, B, h + 2 k, D) and out (B, h, S, D), else two empty tensors; S = tokens of this ring rank.
    Communicates: two all_to_all_single (Ulysses), R-1 hops (ring).
    """
    split, ulysses, rank = _head_split(q.shape[1], k.shape[1], ulysses_group)
    packed, heads_out = q.new_empty(0), q.new_empty(0)
    if ulysses is not None:
        packed = exchange_qkv(q, k, v, split, rank, ulysses)
        q, k, v = split_qkv(packed, split, rank)
    ring = _ring(q, mask_numbers, mask_tensors, layout_table, ring_group, split.size)
    local_kernel = select_kernel(kernel, q.device, q.dtype, softcap)
    block_kernel = BlockKernel(local_kernel, scale, split.head_groups(rank))
    own_sinks = None if sinks is None else sinks[slice(*split.queries(rank))]
    out, lse = ring_forward(ring, block_kernel, q, k, v, own_sinks)
    if ulysses is not None:
        heads_out = out
        out = exchange_out(heads_out, split, ulysses)
    return _token_major(out), lse.contiguous(), packed, _token_major(heads_out)


@attention_op.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask_numbers: list[int],
    mask_tensors: list[Tensor],
    layout_table: Tensor | None,
    sinks: Tensor | None,
    softcap: float,
    scale: float,
    ring_group: str,
    ulysses_group: str,
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    split, ulysses, rank = _head_split(q.shape[1], k.shape[1], ulysses_group)
    batch, _, tokens, dim = q.shape
    total = tokens * split.size
    heads = split.queries(rank)[1] - split.queries(rank)[0]
    out = empty_token_major(q, q.dtype)
    lse = q.new_empty((batch, heads, total), dtype=torch.promote_types(q.dtype, torch.float32))
    if ulysses is None:
        return out, lse, q.new_empty(0), q.new_empty(0)
    heads_out = q.new_empty(batch, total, heads, dim).transpose(1, 2)
    return out, lse, q.new_empty(total, batch, split.width(rank), dim), heads_out


@torch.library.custom_op("lightning_sp::attention_backward", mutates_args=())
def attention_backward_op(
    grad: Tensor,
    saved: list[Tensor],
    out: Tensor,
    lse: Tensor,
    mask_numbers: list[int],
    mask_tensors: list[Tensor],
    layout_table: Tensor | None,
    num_heads: int,
    num_kv_heads: int,
    sinks: Tensor | None,
    softcap: float,
    scale: float,
    ring_group: str,
    ulysses_group: str,
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mirror of `attention_op`.

    Shapes: grad (B, H, s, D); saved: the exchanged q, k, v in one, or the local three; out and lse of this rank's heads ->
    (B, H, s, D), (B, K, s, D) twice, and of the sinks this rank's part, (H,), to be summed over the ranks as every parameter's.
    Communicates: two all_to_all_single (Ulysses), R-1 hops of K, V and R-1 of dK, dV (ring).
    """
    split, ulysses, rank = _head_split(num_heads, num_kv_heads, ulysses_group)
    if ulysses is not None:
        q, k, v = split_qkv(saved[0], split, rank)
        grad = exchange_out_grad(grad, split, rank, ulysses)
    else:
        q, k, v = saved
    ring = _ring(q, mask_numbers, mask_tensors, layout_table, ring_group, split.size)
    local_kernel = select_kernel(kernel, q.device, q.dtype, softcap)
    block_kernel = BlockKernel(local_kernel, scale, split.head_groups(rank))
    dsinks = grad.new_empty(0)
    if sinks is not None:
        heads = slice(*split.queries(rank))
        dsinks = torch.zeros_like(sinks)
        dsinks[heads] = sink_gradient(sinks[heads], grad, out, lse)
    grads = list(ring_backward(ring, block_kernel, grad, q, k, v, out, lse))
    del grad
    if ulysses is not None:
        grads = list(exchange_qkv_grad(grads, split, ulysses))
    dq, dk, dv = map(_token_major, grads)
    return dq, dk, dv, dsinks


@attention_backward_op.register_fake
def _(
    grad: Tensor,
    saved: list[Tensor],
    out: Tensor,
    lse: Tensor,
    mask_numbers: list[int],
    mask_tensors: list[Tensor],
    layout_table: Tensor | None,
    num_heads: int,
    num_kv_heads: int,
    sinks: Tensor | None,
    softcap: float,
    scale: float,
    ring_group: str,
    ulysses_group: str,
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, _, tokens, dim = grad.shape
    dk, dv = (grad.new_empty(batch, tokens, num_kv_heads, dim).transpose(1, 2) for _ in (0, 1))
    return empty_token_major(grad, grad.dtype), dk, dv, grad.new_empty(0) if sinks is None else torch.empty_like(sinks)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, numbers, tensors, table, sinks, softcap, scale, ring_group, ulysses_group, kernel = inputs
    out, lse, packed, heads_out = output
    ctx.mark_non_differentiable(lse, packed, heads_out)
    ctx.set_materialize_grads(False)
    ctx.heads = (q.shape[1], k.shape[1])
    ctx.numbers, ctx.num_mask_tensors = numbers, len(tensors)
    ctx.options = (softcap, scale, ring_group, ulysses_group, kernel)
    saved = (packed, heads_out) if ulysses_group else (q, k, v, out)
    ctx.save_for_backward(lse, sinks, table, *tensors, *saved)


def _backward(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> tuple[Any, ...]:
    no_tensors = [None] * ctx.num_mask_tensors
    if grad is None:
        return (None, None, None, None, no_tensors, *[None] * 7)
    lse, sinks, table, *rest, out = ctx.saved_tensors
    tensors, saved = rest[: ctx.num_mask_tensors], rest[ctx.num_mask_tensors :]
    dq, dk, dv, dsinks = attention_backward_op(
        grad, saved, out, lse, ctx.numbers, tensors, table, *ctx.heads, sinks, *ctx.options
    )
    return (dq, dk, dv, None, no_tensors, None, None if sinks is None else dsinks, *[None] * 5)


attention_op.register_autograd(_backward, setup_context=_save)


def _token_major(tensor: Tensor) -> Tensor:
    """Fix the strides that the fake implementation promises: (B, H, S, D) over (B, S, H, D) memory; kernels return that already."""
    return tensor if tensor.dim() != 4 else tensor.transpose(1, 2).contiguous().transpose(1, 2)


def _head_split(num_heads: int, num_kv_heads: int, ulysses_group: str) -> tuple[HeadSplit, Any, int]:
    group = comm.group_by_name(ulysses_group)
    # Under dynamic shapes the numbers of heads are symbols; a model has fixed ones, so specialising on them costs nothing.
    return HeadSplit(int(num_heads), int(num_kv_heads), comm.size_of(group)), group, comm.rank_in(group)


def _ring(
    q: Tensor,
    numbers: list[int],
    tensors: list[Tensor],
    layout_table: Tensor | None,
    ring_group: str,
    ulysses_size: int,
) -> Ring:
    group = comm.group_by_name(ring_group)
    size = comm.size_of(group)
    mask = AttentionMask.from_arguments(numbers, tensors)
    layout = SequenceLayout.from_table(size, ulysses_size, layout_table)
    plan = plan_of(mask, layout, q.shape[2] * size, q.shape[0])
    return Ring(plan, comm.rank_in(group), group)
