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
    exchange_gradients,
    exchange_out,
    exchange_out_grad,
    exchange_qkv,
    lay_gradients,
    pack_gradients,
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
    ring = _ring(q, mask_numbers, mask_tensors, ring_group, split.size)
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
    num_heads: int,
    num_kv_heads: int,
    sinks: Tensor | None,
    softcap: float,
    scale: float,
    ring_group: str,
    ulysses_group: str,
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mirror of `attention_op`, up to the gradients of this rank's heads, which `gradients_home` sends home.

    Shapes: grad (B, H, s, D); saved: the exchanged q, k, v in one, or the local three; out and lse of this rank's heads ->
    (B, h, S, D), (B, k, S, D) twice, and of the sinks this rank's part, (H,), to be summed over the ranks as every parameter's.
    Communicates: one all_to_all_single (Ulysses), R-1 hops of K, V and R-1 of dK, dV (ring).
    """
    split, ulysses, rank = _head_split(num_heads, num_kv_heads, ulysses_group)
    if ulysses is not None:
        q, k, v = split_qkv(saved[0], split, rank)
        grad = exchange_out_grad(grad, split, rank, ulysses)
    else:
        q, k, v = saved
    ring = _ring(q, mask_numbers, mask_tensors, ring_group, split.size)
    local_kernel = select_kernel(kernel, q.device, q.dtype, softcap)
    block_kernel = BlockKernel(local_kernel, scale, split.head_groups(rank))
    dsinks = grad.new_empty(0)
    if sinks is not None:
        heads = slice(*split.queries(rank))
        dsinks = torch.zeros_like(sinks)
        dsinks[heads] = sink_gradient(sinks[heads], grad, out, lse)
    dq, dk, dv = map(_token_major, ring_backward(ring, block_kernel, grad, q, k, v, out, lse))
    return dq, dk, dv, dsinks


@attention_backward_op.register_fake
def _(
    grad: Tensor,
    saved: list[Tensor],
    out: Tensor,
    lse: Tensor,
    mask_numbers: list[int],
    mask_tensors: list[Tensor],
    num_heads: int,
    num_kv_heads: int,
    sinks: Tensor | None,
    softcap: float,
    scale: float,
    ring_group: str,
    ulysses_group: str,
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    split, _, rank = _head_split(num_heads, num_kv_heads, ulysses_group)
    batch, _, tokens, dim = grad.shape
    (first, last), (first_kv, last_kv) = split.queries(rank), split.keys(rank)
    widths = (last - first, last_kv - first_kv, last_kv - first_kv)
    dq, dk, dv = (grad.new_empty(batch, tokens * split.size, width, dim).transpose(1, 2) for width in widths)
    return dq, dk, dv, grad.new_empty(0) if sinks is None else torch.empty_like(sinks)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, numbers, tensors, sinks, softcap, scale, ring_group, ulysses_group, kernel = inputs
    out, lse, packed, heads_out = output
    ctx.mark_non_differentiable(lse, packed, heads_out)
    ctx.set_materialize_grads(False)
    ctx.heads = (q.shape[1], k.shape[1])
    ctx.numbers, ctx.num_mask_tensors = numbers, len(tensors)
    ctx.options = (softcap, scale, ring_group, ulysses_group, kernel)
    saved = (packed, heads_out) if ulysses_group else (q, k, v, out)
    ctx.save_for_backward(lse, sinks, *tensors, *saved)


def _backward(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> tuple[Any, ...]:
    no_tensors = [None] * ctx.num_mask_tensors
    if grad is None:
        return (None, None, None, None, no_tensors, *[None] * 6)
    lse, sinks, *rest, out = ctx.saved_tensors
    tensors, saved = rest[: ctx.num_mask_tensors], rest[ctx.num_mask_tensors :]
    *grads, dsinks = attention_backward_op(grad, saved, out, lse, ctx.numbers, tensors, *ctx.heads, sinks, *ctx.options)
    has_sinks = sinks is not None
    # What was saved is needed no more, and goes before the buffers of the way home come: they would be the peak (unless the graph is kept).
    del lse, sinks, rest, out, tensors, saved
    ctx.maybe_clear_saved_tensors()
    (num_heads, num_kv_heads), ulysses_group = ctx.heads, ctx.options[3]
    dq, dk, dv = gradients_home(grads, num_heads, num_kv_heads, ulysses_group)
    return (dq, dk, dv, None, no_tensors, dsinks if has_sinks else None, *[None] * 5)


def gradients_home(grads: list[Tensor], num_heads: int, num_kv_heads: int, ulysses_group: str) -> list[Tensor]:
    """Send the gradients of this rank's heads to the ranks of their tokens. The list is emptied.

    An operator for the exchange alone: what it is given lives until it returns, so that around it each buffer goes before the next comes.

    Shapes: (B, h, S, D), (B, k, S, D) twice -> (B, H, s, D), (B, K, s, D) twice. Communicates: one all_to_all_single (Ulysses).
    """
    if not ulysses_group:
        return grads
    split, _, _ = _head_split(num_heads, num_kv_heads, ulysses_group)
    batch, dim = grads[0].shape[0], grads[0].shape[3]
    packed = pack_gradients(grads)
    received = exchange_gradients_op(packed, num_heads, num_kv_heads, ulysses_group)
    del packed
    return list(lay_gradients(received, split, batch, dim))


@torch.library.custom_op("lightning_sp::exchange_gradients", mutates_args=())
def exchange_gradients_op(packed: Tensor, num_heads: int, num_kv_heads: int, ulysses_group: str) -> Tensor:
    """Exchange packed gradients. Shapes: (S, B, h + 2 k, D) -> flat, as `lay_gradients` takes it."""
    split, ulysses, _ = _head_split(num_heads, num_kv_heads, ulysses_group)
    assert ulysses is not None
    return exchange_gradients(packed, split, ulysses)


@exchange_gradients_op.register_fake
def _(packed: Tensor, num_heads: int, num_kv_heads: int, ulysses_group: str) -> Tensor:
    split, _, _ = _head_split(num_heads, num_kv_heads, ulysses_group)
    tokens, batch, _, dim = packed.shape
    return packed.new_empty(tokens // split.size * batch * dim * sum(split.width(u) for u in range(split.size)))


attention_op.register_autograd(_backward, setup_context=_save)


def _token_major(tensor: Tensor) -> Tensor:
    """Fix the strides that the fake implementation promises: (B, H, S, D) over (B, S, H, D) memory; kernels return that already."""
    return tensor if tensor.dim() != 4 else tensor.transpose(1, 2).contiguous().transpose(1, 2)


def _head_split(num_heads: int, num_kv_heads: int, ulysses_group: str) -> tuple[HeadSplit, Any, int]:
    group = comm.group_by_name(ulysses_group)
    # Under dynamic shapes the numbers of heads are symbols; a model has fixed ones, so specialising on them costs nothing.
    return HeadSplit(int(num_heads), int(num_kv_heads), comm.size_of(group)), group, comm.rank_in(group)


def _ring(q: Tensor, numbers: list[int], tensors: list[Tensor], ring_group: str, ulysses_size: int) -> Ring:
    group = comm.group_by_name(ring_group)
    size = comm.size_of(group)
    mask = AttentionMask.from_arguments(numbers, tensors)
    plan = plan_of(mask, SequenceLayout(size, ulysses_size), q.shape[2] * size, q.shape[0])
    return Ring(plan, comm.rank_in(group), group)
