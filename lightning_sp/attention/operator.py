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
from lightning_sp.attention.functions import registered
from lightning_sp.attention.kernel import select_kernel
from lightning_sp.attention.mask import AttentionMask
from lightning_sp.attention.plan import plan_of
from lightning_sp.attention.ring import Ring, ring_backward, ring_forward
from lightning_sp.attention.scores import ScoreGradients, Scores
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
from lightning_sp.attention.ulysses_cross import exchange_cross, exchange_cross_grad, split_cross
from lightning_sp.layout import SequenceLayout


@torch.library.custom_op("lightning_sp::attention", mutates_args=())
def attention_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask_numbers: list[int],
    mask_tensors: list[Tensor],
    score_numbers: list[int],
    score_factors: list[float],
    score_tensors: list[Tensor],
    sinks: Tensor | None,
    scale: float,
    ring_group: str,
    ulysses_group: str,
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Attend over the whole sequence from this rank's part of it.

    Shapes: q (B, H, s, D), k and v (B, K, t, D) -> out (B, H, s, D), lse (B, h, S), and with Ulysses what was exchanged: out (B, h, S, D),
    and q, k, v (S, B, h + 2 k, D) and nothing, or with t != s q (S, B, h, D) and k, v (T, B, 2 k, D); else three empty tensors. S, T:
    tokens of this ring rank.
    Communicates: two all_to_all_single (Ulysses), R-1 hops (ring).
    """
    split, ulysses, rank = _head_split(q.shape[1], k.shape[1], ulysses_group)
    packed, packed_kv, heads_out = (q.new_empty(0) for _ in range(3))
    if ulysses is not None and k.shape[2] == q.shape[2]:
        packed = exchange_qkv(q, k, v, split, rank, ulysses)
        q, k, v = split_qkv(packed, split, rank)
    elif ulysses is not None:
        packed, packed_kv = exchange_cross(q, k, v, split, rank, ulysses)
        q, k, v = split_cross(packed, packed_kv)
    scores = Scores.from_arguments(score_numbers, score_factors, score_tensors)
    ring = _ring(q, k, mask_numbers, mask_tensors, ring_group, split, rank, scores)
    local_kernel = select_kernel(kernel, q.device, q.dtype, scores)
    block_kernel = BlockKernel(local_kernel, scale, split.head_groups(rank))
    own_sinks = None if sinks is None else sinks[slice(*split.queries(rank))]
    out, lse = ring_forward(ring, block_kernel, q, k, v, own_sinks)
    if ulysses is not None:
        heads_out = out
        out = exchange_out(heads_out, split, ulysses)
    return _token_major(out), lse.contiguous(), _token_major(heads_out), packed, packed_kv


@attention_op.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask_numbers: list[int],
    mask_tensors: list[Tensor],
    score_numbers: list[int],
    score_factors: list[float],
    score_tensors: list[Tensor],
    sinks: Tensor | None,
    scale: float,
    ring_group: str,
    ulysses_group: str,
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    split, ulysses, rank = _head_split(q.shape[1], k.shape[1], ulysses_group)
    batch, _, tokens, dim = q.shape
    total = tokens * split.size
    heads = split.queries(rank)[1] - split.queries(rank)[0]
    out = empty_token_major(q, q.dtype)
    lse = q.new_empty((batch, heads, total), dtype=torch.promote_types(q.dtype, torch.float32))
    if ulysses is None:
        return out, lse, q.new_empty(0), q.new_empty(0), q.new_empty(0)
    heads_out = q.new_empty(batch, total, heads, dim).transpose(1, 2)
    if k.shape[2] == tokens:
        return out, lse, heads_out, q.new_empty(total, batch, split.width(rank), dim), q.new_empty(0)
    keys = q.new_empty(k.shape[2] * split.size, batch, split.width(rank) - heads, dim)
    return out, lse, heads_out, q.new_empty(total, batch, heads, dim), keys


@torch.library.custom_op("lightning_sp::attention_backward", mutates_args=())
def attention_backward_op(
    grad: Tensor,
    saved: list[Tensor],
    out: Tensor,
    lse: Tensor,
    mask_numbers: list[int],
    mask_tensors: list[Tensor],
    score_numbers: list[int],
    score_factors: list[float],
    score_tensors: list[Tensor],
    sinks: Tensor | None,
    scale: float,
    ring_group: str,
    ulysses_group: str,
    kernel: str,
    heads: list[int],
    learns: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    """Mirror of `attention_op`, with Ulysses up to the gradients of this rank's heads, which `gradients_home` sends home.

    Shapes: grad (B, H, s, D); saved: the exchanged q, k, v in one or two, or the local three; out and lse of this rank's heads; heads: H, K,
    and the key tokens t -> (B, H, s, D), (B, K, t, D) twice, or from q, k, v in one (B, h, S, D), (B, k, S, D) twice; and of the sinks this
    rank's part, (H,), to be summed over the ranks as every parameter's; and if it `learns`, likewise of each of the scores' tensors, else
    nothing for each.
    Communicates: one all_to_all_single (Ulysses; two where t != s), R-1 hops of K, V and R-1 of dK, dV (ring).
    """
    num_heads, num_kv_heads, _ = heads
    split, ulysses, rank = _head_split(num_heads, num_kv_heads, ulysses_group)
    cross = len(saved) == 2
    if ulysses is not None:
        q, k, v = split_cross(*saved) if cross else split_qkv(saved[0], split, rank)
        grad = exchange_out_grad(grad, split, rank, ulysses)
    else:
        q, k, v = saved
    scores = Scores.from_arguments(score_numbers, score_factors, score_tensors)
    ring = _ring(q, k, mask_numbers, mask_tensors, ring_group, split, rank, scores)
    gradients = ScoreGradients.like(scores, learns)
    local_kernel = select_kernel(kernel, q.device, q.dtype, scores, gradients)
    block_kernel = BlockKernel(local_kernel, scale, split.head_groups(rank))
    dsinks = grad.new_empty(0)
    if sinks is not None:
        own = slice(*split.queries(rank))
        dsinks = torch.zeros_like(sinks)
        dsinks[own] = sink_gradient(sinks[own], grad, out, lse)
    grads = list(ring_backward(ring, block_kernel, grad, q, k, v, out, lse))
    if ulysses is not None and cross:
        del grad
        grads = list(exchange_cross_grad(grads, split, ulysses))
    dq, dk, dv = map(_token_major, grads)
    return dq, dk, dv, dsinks, gradients.as_arguments(scores, score_tensors)


@attention_backward_op.register_fake
def _(
    grad: Tensor,
    saved: list[Tensor],
    out: Tensor,
    lse: Tensor,
    mask_numbers: list[int],
    mask_tensors: list[Tensor],
    score_numbers: list[int],
    score_factors: list[float],
    score_tensors: list[Tensor],
    sinks: Tensor | None,
    scale: float,
    ring_group: str,
    ulysses_group: str,
    kernel: str,
    heads: list[int],
    learns: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    batch, num_heads, queries, dim = grad.shape
    _, num_kv_heads, keys = heads
    if len(saved) == 1:
        split, _, rank = _head_split(num_heads, num_kv_heads, ulysses_group)
        (first, last), (first_kv, last_kv) = split.queries(rank), split.keys(rank)
        num_heads, num_kv_heads, queries, keys = (
            last - first,
            last_kv - first_kv,
            queries * split.size,
            keys * split.size,
        )
    dq = grad.new_empty(batch, queries, num_heads, dim).transpose(1, 2)
    dk, dv = (grad.new_empty(batch, keys, num_kv_heads, dim).transpose(1, 2) for _ in (0, 1))
    learned = [
        torch.empty_like(t, memory_format=torch.contiguous_format)
        if learns and t.is_floating_point()
        else t.new_empty(0)
        for t in score_tensors
    ]
    dsinks = grad.new_empty(0) if sinks is None else torch.empty_like(sinks)
    return dq, dk, dv, dsinks, learned


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, numbers, tensors, score_numbers, factors, score_tensors, sinks, *options = inputs
    out, lse, heads_out, packed, packed_kv = output
    ctx.mark_non_differentiable(lse, heads_out, packed, packed_kv)
    ctx.set_materialize_grads(False)
    ctx.heads = [q.shape[1], k.shape[1], k.shape[2]]
    ctx.numbers, ctx.score_numbers, ctx.factors = numbers, score_numbers, factors
    ctx.counts = (len(tensors), len(score_tensors))
    ctx.options = options
    # The backward looks functions up by their numbers: they live as long as it may run.
    ctx.functions = [registered(number) for number in score_numbers[:2]]
    ulysses_group = options[2]
    exchanged = (packed, packed_kv) if k.shape[2] != q.shape[2] else (packed,)
    saved = (*exchanged, heads_out) if ulysses_group else (q, k, v, out)
    ctx.save_for_backward(lse, sinks, *tensors, *score_tensors, *saved)


def _backward(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> tuple[Any, ...]:
    num_masks, num_scores = ctx.counts
    no_masks, no_scores = [None] * num_masks, [None] * num_scores
    if grad is None:
        return (None, None, None, None, no_masks, None, None, no_scores, *[None] * 5)
    lse, sinks, *rest, out = ctx.saved_tensors
    masks, score_tensors, saved = (
        rest[:num_masks],
        rest[num_masks : num_masks + num_scores],
        rest[num_masks + num_scores :],
    )
    wanted = ctx.needs_input_grad[7]
    *grads, dsinks, learned = attention_backward_op(
        grad, saved, out, lse, ctx.numbers, masks, ctx.score_numbers, ctx.factors, score_tensors, sinks, *ctx.options,
        ctx.heads, any(wanted),
    )  # fmt: skip
    dscores = [part if each else None for part, each in zip(learned, wanted, strict=True)]
    has_sinks, are_away = sinks is not None, len(saved) == 1
    # What was saved is needed no more, and goes before the buffers of the way home come: they would be the peak (unless the graph is kept).
    del lse, sinks, rest, out, masks, score_tensors, saved
    ctx.maybe_clear_saved_tensors()
    if are_away:
        num_heads, num_kv_heads, _ = ctx.heads
        grads = gradients_home(grads, num_heads, num_kv_heads, ctx.options[2])
    return (*grads, None, no_masks, None, None, dscores, dsinks if has_sinks else None, *[None] * 4)


def gradients_home(grads: list[Tensor], num_heads: int, num_kv_heads: int, ulysses_group: str) -> list[Tensor]:
    """Send the gradients of this rank's heads to the ranks of their tokens. The list is emptied.

    An operator for the exchange alone: what it is given lives until it returns, so that around it each buffer goes before the next comes.

    Shapes: (B, h, S, D), (B, k, S, D) twice -> (B, H, s, D), (B, K, s, D) twice. Communicates: one all_to_all_single (Ulysses).
    """
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


def _ring(
    q: Tensor,
    k: Tensor,
    numbers: list[int],
    tensors: list[Tensor],
    ring_group: str,
    split: HeadSplit,
    ulysses_rank: int,
    scores: Scores,
) -> Ring:
    group = comm.group_by_name(ring_group)
    size = comm.size_of(group)
    mask = AttentionMask.from_arguments(numbers, tensors)
    plan = plan_of(mask, SequenceLayout(size, split.size), q.shape[2] * size, q.shape[0], k.shape[2] * size)
    return Ring(plan, comm.rank_in(group), group, split.queries(ulysses_rank) if scores.names() else None)
