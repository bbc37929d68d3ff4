"""The attention as one `torch.library` operator: ulysses(ring(block)), its communication inside.

One operator already in eager code, so that a selective checkpoint policy can save it whole and the recomputation never repeats a kernel or a
collective; opaque to torch.compile. It returns all that the backward needs as outputs, for what is not an output a policy cannot save.
An axis of size 1 has the empty group name and its step vanishes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from lightning_sp import comm
from lightning_sp.attention.kernels.accumulate import empty_token_major
from lightning_sp.attention.kernels.block_kernel import BlockKernel
from lightning_sp.attention.kernels.select import select_kernel
from lightning_sp.attention.plan.block_sparsity import empty_map, of_map, search
from lightning_sp.attention.plan.blocks import Plan, plan_of, tile_on
from lightning_sp.attention.schemes.all_gather import all_gather_backward, all_gather_forward
from lightning_sp.attention.schemes.cost import gathers
from lightning_sp.attention.schemes.cross_attention import (
    cross_counts,
    exchange_cross,
    lay_cross_gradients,
    pack_cross_gradients,
    split_cross,
)
from lightning_sp.attention.schemes.ring import Ring, ring_backward, ring_forward
from lightning_sp.attention.schemes.shared_memory import backward_arena, forward_arena
from lightning_sp.attention.schemes.ulysses import (
    HeadSplit,
    exchange_gradients,
    exchange_out,
    exchange_out_grad,
    exchange_qkv,
    gradient_counts,
    lay_gradients,
    pack_gradients,
    split_qkv,
)
from lightning_sp.attention.spec.mask import AttentionMask
from lightning_sp.attention.spec.score_mod import function_by_number
from lightning_sp.attention.spec.scores import ScoreGradients, Scores
from lightning_sp.attention.spec.sinks import sink_gradient
from lightning_sp.comm.cpu.shared_memory import Arena
from lightning_sp.layout import Range, SequenceLayout

_Given = ParamSpec("_Given")
_Returned = TypeVar("_Returned")


def _outside_autocast(body: Callable[_Given, _Returned]) -> Callable[_Given, _Returned]:
    """Compute in the dtypes given: autocast holds inside an operator too, and would round the tiled kernel's float32 products."""

    @wraps(body)
    def outside(*args: _Given.args, **kwargs: _Given.kwargs) -> _Returned:
        first = args[0]
        assert isinstance(first, Tensor)
        with torch.autocast(first.device.type, enabled=False):
            return body(*args, **kwargs)

    return outside


@torch.library.custom_op("lightning_sp::attention", mutates_args=())
@_outside_autocast
def attention_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask_numbers: list[int],
    mask_tensors: list[Tensor],
    layout_table: Tensor | None,
    score_numbers: list[int],
    score_factors: list[float],
    score_tensors: list[Tensor],
    sinks: Tensor | None,
    scale: float,
    ring_group: str,
    ulysses_group: str,
    kernel: str,
    ring_transport: str,
    ring_method: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Attend over the whole sequence from this rank's part of it.

    Shapes: q (B, H, s, D), k and v (B, K, t, D) -> out (B, H, s, D), lse (B, h, S), and with Ulysses what was exchanged: out (B, h, S, D),
    and q, k, v (S, B, h + 2 k, D) and nothing, or with t != s q (S, B, h, D) and k, v (T, B, 2 k, D); else three empty tensors; and
    with "network_kept" the keys and values that arrived ((R-1) T, 2, B, k, D), else empty; and the map of the blocks that a matrix or a
    function lets be seen, else empty. S, T: tokens of this ring rank.
    Communicates: two all_to_all_single (Ulysses), R-1 hops (ring), of which nothing goes by the group where memory is shared; before
    them, for that map, two small all_reduces, in the forward alone.
    """
    split, ulysses, rank = _head_split(q.shape[1], k.shape[1], ulysses_group)
    scores = Scores.from_arguments(score_numbers, score_factors, score_tensors)
    mask = (mask_numbers, mask_tensors, layout_table)
    seen = empty_map(score_numbers, comm.size_of(comm.group_by_name(ring_group)) * split.size)
    if seen.numel():
        # Before anything else travels: a function that fails here fails on all ranks.
        whole = _plan(q, k, *mask, ring_group, split, tokens=split.size)
        group = comm.group_by_name(ring_group)
        seen = search(scores, whole, comm.rank_in(group), split.queries(rank), q, (group, ulysses))
    packed, packed_kv, heads_out = (q.new_empty(0) for _ in range(3))
    if ulysses is not None and k.shape[2] == q.shape[2]:
        packed = exchange_qkv(q, k, v, split, rank, ulysses)
        q, k, v = split_qkv(packed, split, rank)
    elif ulysses is not None:
        packed, packed_kv = exchange_cross(q, k, v, split, rank, ulysses)
        q, k, v = split_cross(packed, packed_kv)
    arena = forward_arena(k, ring_group, ring_transport)
    ring = _ring(_plan(q, k, *mask, ring_group, split, seen), ring_group, split.queries(rank), scores, arena)
    local_kernel = select_kernel(kernel, q.device, q.dtype, scores)
    block_kernel = BlockKernel(local_kernel, scale, split.head_groups(rank))
    own_sinks = None if sinks is None else sinks[slice(*split.queries(rank))]
    kept = _empty_kept(k, ring.size, ring_transport)
    forward = all_gather_forward if gathers(ring_method, ring, k) else ring_forward
    out, lse = forward(ring, block_kernel, q, k, v, own_sinks, kept if kept.numel() else None)
    if ulysses is not None:
        heads_out = out
        out = exchange_out(heads_out, split, ulysses)
    return _token_major(out), lse.contiguous(), _token_major(heads_out), packed, packed_kv, kept, seen


@attention_op.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask_numbers: list[int],
    mask_tensors: list[Tensor],
    layout_table: Tensor | None,
    score_numbers: list[int],
    score_factors: list[float],
    score_tensors: list[Tensor],
    sinks: Tensor | None,
    scale: float,
    ring_group: str,
    ulysses_group: str,
    kernel: str,
    ring_transport: str,
    ring_method: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    split, ulysses, rank = _head_split(q.shape[1], k.shape[1], ulysses_group)
    batch, _, tokens, dim = q.shape
    total = tokens * split.size
    heads = split.queries(rank)[1] - split.queries(rank)[0]
    out = empty_token_major(q, q.dtype)
    lse = q.new_empty((batch, heads, total), dtype=torch.promote_types(q.dtype, torch.float32))
    size = comm.size_of(comm.group_by_name(ring_group))
    seen = empty_map(score_numbers, size * split.size)
    if ulysses is None:
        return out, lse, q.new_empty(0), q.new_empty(0), q.new_empty(0), _empty_kept(k, size, ring_transport), seen
    first, last = split.keys(rank)
    exchanged = k.new_empty(batch, last - first, k.shape[2] * split.size, dim)
    kept = _empty_kept(exchanged, size, ring_transport)
    heads_out = q.new_empty(batch, total, heads, dim).transpose(1, 2)
    if k.shape[2] == tokens:
        return out, lse, heads_out, q.new_empty(total, batch, split.width(rank), dim), q.new_empty(0), kept, seen
    keys = q.new_empty(k.shape[2] * split.size, batch, split.width(rank) - heads, dim)
    return out, lse, heads_out, q.new_empty(total, batch, heads, dim), keys, kept, seen


@torch.library.custom_op("lightning_sp::attention_backward", mutates_args=())
@_outside_autocast
def attention_backward_op(
    grad: Tensor,
    saved: list[Tensor],
    kept: Tensor,
    seen: Tensor,
    out: Tensor,
    lse: Tensor,
    mask_numbers: list[int],
    mask_tensors: list[Tensor],
    layout_table: Tensor | None,
    score_numbers: list[int],
    score_factors: list[float],
    score_tensors: list[Tensor],
    sinks: Tensor | None,
    scale: float,
    ring_group: str,
    ulysses_group: str,
    kernel: str,
    ring_transport: str,
    ring_method: str,
    num_heads: int,
    num_kv_heads: int,
    learns: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    """Mirror of `attention_op`, up to the gradients of this rank's heads, which `gradients_home` sends home.

    Shapes: grad (B, H, s, D); saved: the exchanged q, k, v in one or two, or the local three; kept and seen: as the forward returned them; out
    and lse of this rank's heads -> (B, h, S, D), (B, k, T, D) twice, and of the sinks this rank's part, (H,), to be summed over the ranks
    as every parameter's; and if it `learns`, likewise of each of the scores' tensors, else nothing for each.
    Communicates: one all_to_all_single (Ulysses), R-1 hops of K, V and R-1 of dK, dV (ring).
    """
    split, ulysses, rank = _head_split(num_heads, num_kv_heads, ulysses_group)
    cross = len(saved) == 2
    if ulysses is not None:
        q, k, v = split_cross(*saved) if cross else split_qkv(saved[0], split, rank)
        grad = exchange_out_grad(grad, split, rank, ulysses)
    else:
        q, k, v = saved
    scores = Scores.from_arguments(score_numbers, score_factors, score_tensors)
    arena = backward_arena(k, ring_group, ring_transport)
    plan = _plan(q, k, mask_numbers, mask_tensors, layout_table, ring_group, split, seen)
    ring = _ring(plan, ring_group, split.queries(rank), scores, arena)
    gradients = ScoreGradients.like(scores, learns)
    local_kernel = select_kernel(kernel, q.device, q.dtype, scores, gradients)
    block_kernel = BlockKernel(local_kernel, scale, split.head_groups(rank))
    dsinks = grad.new_empty(0)
    if sinks is not None:
        own = slice(*split.queries(rank))
        dsinks = torch.zeros_like(sinks)
        dsinks[own] = sink_gradient(sinks[own], grad, out, lse)
    backward = all_gather_backward if gathers(ring_method, ring, k) else ring_backward
    gradients_of_heads = backward(ring, block_kernel, grad, q, k, v, out, lse, kept if kept.numel() else None)
    dq, dk, dv = map(_token_major, gradients_of_heads)
    return dq, dk, dv, dsinks, gradients.as_arguments(scores, score_tensors)


@attention_backward_op.register_fake
def _(
    grad: Tensor,
    saved: list[Tensor],
    kept: Tensor,
    seen: Tensor,
    out: Tensor,
    lse: Tensor,
    mask_numbers: list[int],
    mask_tensors: list[Tensor],
    layout_table: Tensor | None,
    score_numbers: list[int],
    score_factors: list[float],
    score_tensors: list[Tensor],
    sinks: Tensor | None,
    scale: float,
    ring_group: str,
    ulysses_group: str,
    kernel: str,
    ring_transport: str,
    ring_method: str,
    num_heads: int,
    num_kv_heads: int,
    learns: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    split, _, rank = _head_split(num_heads, num_kv_heads, ulysses_group)
    batch, _, tokens, dim = grad.shape
    # In cross attention k and v have tokens of their own: of the local ones, or of the exchanged.
    keys = saved[1].shape[2] if not ulysses_group else saved[-1].shape[0]
    (first, last), (first_kv, last_kv) = split.queries(rank), split.keys(rank)
    dq = grad.new_empty(batch, tokens * split.size, last - first, dim).transpose(1, 2)
    dk, dv = (grad.new_empty(batch, keys, last_kv - first_kv, dim).transpose(1, 2) for _ in (0, 1))
    learned = [
        torch.empty_like(t, memory_format=torch.contiguous_format)
        if learns and t.is_floating_point()
        else t.new_empty(0)
        for t in score_tensors
    ]
    dsinks = grad.new_empty(0) if sinks is None else torch.empty_like(sinks)
    return dq, dk, dv, dsinks, learned


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, numbers, tensors, table, score_numbers, factors, score_tensors, sinks, *options = inputs
    out, lse, heads_out, packed, packed_kv, kept, seen = output
    ctx.mark_non_differentiable(lse, heads_out, packed, packed_kv, kept, seen)
    ctx.set_materialize_grads(False)
    ctx.heads = [q.shape[1], k.shape[1]]
    ctx.numbers, ctx.score_numbers, ctx.factors = numbers, score_numbers, factors
    ctx.counts = (len(tensors), len(score_tensors))
    ctx.options = options
    # The backward looks functions up by their numbers: they live as long as it may run.
    # A compiled graph takes numbers that change from call to call as symbols, and keeps nothing: there the caller's mask keeps its function.
    ctx.functions = [function_by_number(number) for number in score_numbers[:2] if isinstance(number, int)]
    ulysses_group = options[2]
    exchanged = (packed, packed_kv) if k.shape[2] != q.shape[2] else (packed,)
    saved = (*exchanged, heads_out) if ulysses_group else (q, k, v, out)
    ctx.save_for_backward(lse, sinks, table, kept, seen, *tensors, *score_tensors, *saved)


def _backward(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> tuple[Any, ...]:
    num_masks, num_scores = ctx.counts
    no_masks, no_scores = [None] * num_masks, [None] * num_scores
    if grad is None:
        return (None, None, None, None, no_masks, None, None, None, no_scores, *[None] * 7)
    lse, sinks, table, kept, seen, *rest, out = ctx.saved_tensors
    masks, score_tensors, saved = (
        rest[:num_masks],
        rest[num_masks : num_masks + num_scores],
        rest[num_masks + num_scores :],
    )
    wanted = ctx.needs_input_grad[8]
    *grads, dsinks, learned = attention_backward_op(
        grad, saved, kept, seen, out, lse, ctx.numbers, masks, table, ctx.score_numbers, ctx.factors, score_tensors, sinks,
        *ctx.options, *ctx.heads, any(wanted),
    )  # fmt: skip
    dscores = [part if each else None for part, each in zip(learned, wanted, strict=True)]
    has_sinks, ulysses_group = sinks is not None, ctx.options[2]
    # What was saved is needed no more, and goes before the buffers of the way home come: they would be the peak (unless the graph is kept).
    del lse, sinks, kept, rest, out, masks, score_tensors, saved
    ctx.maybe_clear_saved_tensors()
    num_heads, num_kv_heads = ctx.heads
    dq, dk, dv = gradients_home(grads, num_heads, num_kv_heads, ulysses_group)
    return (dq, dk, dv, None, no_masks, None, None, None, dscores, dsinks if has_sinks else None, *[None] * 6)


def gradients_home(grads: list[Tensor], num_heads: int, num_kv_heads: int, ulysses_group: str) -> list[Tensor]:
    """Send the gradients of this rank's heads to the ranks of their tokens. The list is emptied.

    An operator for the exchange alone: what it is given lives until it returns, so that around it each buffer goes before the next comes.

    Shapes: (B, h, S, D), (B, k, T, D) twice -> (B, H, s, D), (B, K, t, D) twice. Communicates: one all_to_all_single (Ulysses).
    """
    if not ulysses_group:
        return grads
    split, _, _ = _head_split(num_heads, num_kv_heads, ulysses_group)
    batch, _, queries, dim = grads[0].shape
    keys = grads[1].shape[2]
    if keys == queries:
        packed, received = pack_gradients(grads), gradient_counts(split, batch, queries, dim)
    else:
        packed, received = pack_cross_gradients(grads, split.size), cross_counts(split, batch, queries, keys, dim)
    home = exchange_gradients_op(packed, received, ulysses_group)
    del packed
    if keys == queries:
        return list(lay_gradients(home, split, batch, dim))
    return list(lay_cross_gradients(home, split, batch=batch, queries=queries, keys=keys, dim=dim))


@torch.library.custom_op("lightning_sp::exchange_gradients", mutates_args=())
def exchange_gradients_op(packed: Tensor, received: list[int], ulysses_group: str) -> Tensor:
    """Exchange packed gradients. Shapes: any, an equal part of its elements for each rank -> (sum(received),), in rank order."""
    ulysses = comm.group_by_name(ulysses_group)
    assert ulysses is not None
    return exchange_gradients(packed, received, ulysses)


@exchange_gradients_op.register_fake
def _(packed: Tensor, received: list[int], ulysses_group: str) -> Tensor:
    return packed.new_empty(sum(received))


attention_op.register_autograd(_backward, setup_context=_save)


def _empty_kept(k: Tensor, ring_size: int, transport: str) -> Tensor:
    """Return room for the keys and values of all other ranks; a mask may need less of it. Shapes: (B, K, T, D) -> ((R-1) T, 2, B, K, D)."""
    if transport != "network_kept" or ring_size == 1:
        return k.new_empty(0)
    batch, heads, tokens, dim = k.shape
    return k.new_empty((ring_size - 1) * tokens, 2, batch, heads, dim)


def _token_major(tensor: Tensor) -> Tensor:
    """Fix the strides that the fake implementation promises: (B, H, S, D) over (B, S, H, D) memory; kernels return that already."""
    return tensor if tensor.dim() != 4 else tensor.transpose(1, 2).contiguous().transpose(1, 2)


def _head_split(num_heads: int, num_kv_heads: int, ulysses_group: str) -> tuple[HeadSplit, Any, int]:
    group = comm.group_by_name(ulysses_group)
    # Under dynamic shapes the numbers of heads are symbols; a model has fixed ones, so specialising on them costs nothing.
    return HeadSplit(int(num_heads), int(num_kv_heads), comm.size_of(group)), group, comm.rank_in(group)


def _plan(
    q: Tensor,
    k: Tensor,
    numbers: list[int],
    tensors: list[Tensor],
    layout_table: Tensor | None,
    ring_group: str,
    split: HeadSplit,
    seen: Tensor | None = None,
    tokens: int = 1,
) -> Plan:
    """Return the plan of what the intervals of a mask and the map of the rest let be seen.

    Args:
        q: queries of this ring rank, or of this rank.
        k: keys likewise.
        numbers: of the mask.
        tensors: of the mask.
        layout_table: of the layout.
        ring_group: the ring's name.
        split: of the heads.
        seen: the map; None or empty where nothing is searched.
        tokens: how many times the queries that are given a ring rank has.
    """
    size = comm.size_of(comm.group_by_name(ring_group))
    length, keys = (t.shape[2] * size * tokens for t in (q, k))
    layout = SequenceLayout.from_table(size, split.size, layout_table)
    blocks = None if seen is None else of_map(seen, length, keys)
    mask = AttentionMask.from_arguments(numbers, tensors)
    return plan_of(mask, layout, length, q.shape[0], keys, blocks, tile_on(q.device.type))


def _ring(plan: Plan, ring_group: str, heads: Range, scores: Scores, arena: Arena | None) -> Ring:
    group = comm.group_by_name(ring_group)
    return Ring(plan, comm.rank_in(group), group, heads if scores.names() else None, arena)
