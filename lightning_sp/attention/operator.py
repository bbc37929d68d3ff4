"""The attention as one `torch.library` operator: ulysses(ring(block)), its communication inside.

One operator already in eager code, so that a selective checkpoint policy can save it whole and the recomputation never repeats a kernel or a
collective; opaque to torch.compile. It returns all that the backward needs as outputs, for what is not an output a policy cannot save.
An axis of size 1 has the empty group name and its step vanishes. What the arguments `numbers`, `factors`, `tensors` and `options` say is in
`spec.codec`; what the operators return without data is in `fakes`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from itertools import chain, islice
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_sp import comm
from lightning_sp.attention.fakes import Outputs, fake_backward, fake_forward, fake_gradients
from lightning_sp.attention.kernels.kernel import Kernel
from lightning_sp.attention.kernels.merge import BlockKernel
from lightning_sp.attention.kernels.select import select_kernel
from lightning_sp.attention.plan.block_sparsity import empty_map, of_map, search
from lightning_sp.attention.plan.blocks import Plan, plan_of, tile_on
from lightning_sp.attention.schemes.all_gather import all_gather_backward, all_gather_forward
from lightning_sp.attention.schemes.cross_attention import cross_counts, lay_cross_gradients, pack_cross_gradients
from lightning_sp.attention.schemes.head_split import HeadSplit, length
from lightning_sp.attention.schemes.query_heads import QueryHeads, SavedHeads
from lightning_sp.attention.schemes.ring import Ring, ring_backward, ring_forward
from lightning_sp.attention.schemes.ring_method import uses_all_gather
from lightning_sp.attention.schemes.stages import (
    OutExchange,
    empty_exchanged,
    exchange_out_grad,
    exchange_qkv,
    exchanged_qkv,
    whole_parts,
)
from lightning_sp.attention.schemes.transport import empty_saved_kv
from lightning_sp.attention.schemes.ulysses import (
    Ulysses,
    exchange_gradients,
    gradient_counts,
    lay_gradients,
    pack_gradients,
)
from lightning_sp.attention.spec.codec import (
    AttentionSpec,
    Code,
    decode,
    encode_gradients,
    learns_scores,
    living_functions,
    static_part,
)
from lightning_sp.attention.spec.score_mod import check_unchanged, told_by
from lightning_sp.attention.spec.scores import ScoreGradients
from lightning_sp.attention.spec.sinks import sink_gradient
from lightning_sp.layout import SequenceLayout

_Given = ParamSpec("_Given")
_Returned = TypeVar("_Returned")


def _outside_autocast(body: Callable[_Given, _Returned]) -> Callable[_Given, _Returned]:
    """Compute in the dtypes given: autocast holds inside an operator too, and would round the tiled kernel's float32 products."""

    @wraps(body)
    def outside(*args: _Given.args, **kwargs: _Given.kwargs) -> _Returned:
        first = args[0]
        assert isinstance(first, Tensor)
        if not torch.is_autocast_enabled(device := first.device.type):
            return body(*args, **kwargs)
        # What torch.autocast(enabled=False) does, but for its cost, in each layer.
        torch.set_autocast_enabled(device, False)
        try:
            return body(*args, **kwargs)
        finally:
            torch.set_autocast_enabled(device, True)

    return outside


@torch.library.custom_op("lightning_sp::attention", mutates_args=())
@_outside_autocast
def attention_op(
    q: Tensor, k: Tensor, v: Tensor, numbers: list[int], factors: list[float], tensors: list[Tensor], options: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Attend over the whole sequence from this rank's part of it.

    Shapes: q (B, H, s, D), k and v (B, K, t, D) -> `fakes.Outputs`.
    Communicates: two all_to_all_single for each stage (Ulysses), R-1 hops for each pass (ring), of which nothing goes by the group where
    memory is shared; before them, where blocks that a matrix or a function hides are searched, two small all_reduces, in the forward alone.
    """
    code = Code(numbers, factors, tensors, options)
    spec = decode(code)
    ulysses = Ulysses.of(spec.ulysses_group, q.shape[1], k.shape[1], spec.options.ulysses_stages)
    group, sizes = comm.group_by_name(spec.ring_group), (q.shape[2] * ulysses.size, k.shape[2] * ulysses.size)
    _check_peers("attention", group, ulysses.group)
    visible = empty_map(code, comm.size_of(group) * ulysses.size)
    if visible.numel():
        # Before anything else travels: a function that fails here fails on all ranks.
        whole, groups = _plan(spec, ulysses, q, sizes), (group, ulysses.group)
        visible = search(spec.scores, whole, comm.rank_in(group), ulysses.queries, q, groups)
    ring = _ring(_plan(spec, ulysses, q, sizes, visible), spec, ulysses)
    local_kernel = select_kernel(spec.options, q.device, q.dtype, q.shape[-1], spec.scores)
    exchanged = empty_exchanged(q, k, ulysses)
    saved_kv = empty_saved_kv(
        k, ring.size if spec.options.ring_saves_kv else 1, heads=length(ulysses.keys), tokens=sizes[1]
    )
    arriving, leaving, lse = exchange_qkv(q, k, v, ulysses, exchanged), OutExchange(q, ulysses), list[Tensor]()

    def finish(out: Tensor, of_heads: Tensor) -> None:
        lse.append(of_heads)
        leaving.send(out)

    for one_pass, saved in _passes(ulysses, saved_kv):
        stages, (own_q, own_k, own_v) = one_pass.each_stage(), next(arriving)
        queries = chain([own_q], (of_stage for of_stage, _, _ in islice(arriving, len(stages) - 1)))
        parts = (
            _query_heads(of_stage, stage, one_pass, ulysses, spec, local_kernel)
            for stage, of_stage in zip(stages, queries, strict=True)
        )
        forward = all_gather_forward if _at_once(ring, own_k) else ring_forward
        forward(ring, (own_k, own_v), parts, finish, saved)
    exchanged += [q.new_empty(0) for _ in range(2 - len(exchanged))]
    return Outputs(
        out=_token_major(leaving.finish()),
        lse=(lse[0] if len(lse) == 1 else torch.cat(lse, 1)).contiguous(),
        exchanged=exchanged[0],
        exchanged_kv=exchanged[1],
        saved_kv=saved_kv,
        visible=visible,
    )


@torch.library.custom_op("lightning_sp::attention_backward", mutates_args=())
@_outside_autocast
def attention_backward_op(
    grad: Tensor,
    saved: list[Tensor],
    saved_kv: Tensor,
    visible: Tensor,
    out: Tensor,
    lse: Tensor,
    num_heads: int,
    num_kv_heads: int,
    learns: bool,
    numbers: list[int],
    factors: list[float],
    tensors: list[Tensor],
    options: str,
) -> tuple[list[Tensor], list[Tensor]]:
    """Mirror of `attention_op`, up to the gradients of this rank's heads, which `gradients_home` sends home.

    Shapes: grad (B, H, s, D); saved: the exchanged q, k, v in one or two, or the local three; saved_kv and visible as the forward returned
    them; out of this rank's tokens, (B, H, s, D), lse of its heads -> for each stage (B, h, S, D), (B, k, T, D) twice, of the heads that
    travelled in it; and for each of `tensors` its gradient, to be summed over the ranks as every parameter's, or nothing; what changes the
    scores gets one if it `learns`.
    Communicates: one all_to_all_single for each stage and one of a number for each token and head (Ulysses), R-1 hops of K, V and R-1 of dK, dV
    for each pass (ring).
    """
    code = Code(numbers, factors, tensors, options)
    spec = decode(code)
    ulysses = Ulysses.of(spec.ulysses_group, num_heads, num_kv_heads, spec.options.ulysses_stages)
    _check_peers("the backward of attention", comm.group_by_name(spec.ring_group), ulysses.group)
    qkv = [(saved[0], saved[1], saved[2])] if ulysses.group is None else exchanged_qkv(saved, ulysses)
    first_q, first_k, _ = qkv[0]
    ring = _ring(_plan(spec, ulysses, first_q, (first_q.shape[2], first_k.shape[2]), visible), spec, ulysses)
    gradients = ScoreGradients.like(spec.scores, learns)
    local_kernel = select_kernel(spec.options, grad.device, first_q.dtype, first_q.shape[-1], spec.scores, gradients)
    dsinks = None if spec.sinks is None else torch.zeros_like(spec.sinks)
    arriving = zip(ulysses.split.each_stage(), qkv, exchange_out_grad(grad, out, ulysses), strict=True)

    def saved_heads(one_pass: HeadSplit, stage: HeadSplit, q: Tensor, out: Tensor, grad: Tensor) -> SavedHeads:
        queries = _query_heads(q, stage, one_pass, ulysses, spec, local_kernel)
        own, own_lse = slice(*stage.queries(ulysses.rank)), lse[:, slice(*queries.heads)]
        if spec.sinks is not None and dsinks is not None:
            dsinks[own] = sink_gradient(spec.sinks[own], grad, out, own_lse)
        return SavedHeads(queries=queries, grad=grad, out=out, lse=own_lse)

    made: list[Tensor] = []
    for one_pass, saved_keys in _passes(ulysses, saved_kv):
        (_, own_k, own_v), own_stages = qkv[one_pass.first_stage], islice(arriving, len(one_pass.each_stage()))
        parts = (saved_heads(one_pass, stage, q, of_out, of_grad) for stage, (q, _, _), (of_grad, of_out) in own_stages)
        backward = all_gather_backward if _at_once(ring, own_k) else ring_backward
        dqs, dk, dv = backward(ring, (own_k, own_v), parts, saved_keys)
        for number, dq in enumerate(dqs):
            made += map(_token_major, (dq, dk, dv) if number == 0 else (dq, _no_heads(own_k), _no_heads(own_k)))
    return made, encode_gradients(code, sinks=dsinks, bias=gradients.bias, of_function=gradients.tensors)


@torch.library.custom_op("lightning_sp::exchange_gradients", mutates_args=())
def exchange_gradients_op(packed: Tensor, received: list[int], ulysses_group: str) -> Tensor:
    """Exchange packed gradients. Shapes: any, an equal part of its elements for each rank -> (sum(received),), in rank order."""
    ulysses = comm.group_by_name(ulysses_group)
    assert ulysses is not None
    _check_peers("the exchange of gradients of attention", ulysses)
    return exchange_gradients(packed, received, ulysses)


def _check_peers(what: str, *groups: ProcessGroup | None) -> None:
    """Meet before what travels, for it may go by memory that ranks share."""
    for each in groups:
        if each is not None:
            comm.check_peers(each, what)


attention_op.register_fake(fake_forward)
attention_backward_op.register_fake(fake_backward)
exchange_gradients_op.register_fake(fake_gradients)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, *code_parts = inputs
    code, made = Code(*code_parts), Outputs(*output)
    _, *for_backward = made
    ctx.mark_non_differentiable(*for_backward)
    ctx.set_materialize_grads(False)
    ctx.num_heads, ctx.num_kv_heads = q.shape[1], k.shape[1]
    # The backward looks functions up by their numbers: they live as long as it may run.
    ctx.functions = living_functions(code)
    ctx.told = [*map(told_by, ctx.functions)]
    ctx.num_tensors, ctx.code = len(code.tensors), code._replace(tensors=[])
    exchanged = (made.exchanged, made.exchanged_kv) if k.shape[2] != q.shape[2] else (made.exchanged,)
    has_ulysses = bool(static_part(code.options).ulysses_group)
    saved = exchanged if has_ulysses else (q, k, v)
    ctx.save_for_backward(made.lse, made.saved_kv, made.visible, made.out, *code.tensors, *saved)


def _backward(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> tuple[Any, ...]:
    if grad is None:
        return _in_order(tensors=[None] * ctx.num_tensors)
    check_unchanged(ctx.functions, ctx.told)
    lse, saved_kv, visible, out, *rest = ctx.saved_tensors
    code = ctx.code._replace(tensors=rest[: ctx.num_tensors])
    wanted = _by_name(ctx.needs_input_grad)["tensors"]
    heads, learns = (ctx.num_heads, ctx.num_kv_heads), learns_scores(code, wanted)
    saved = rest[ctx.num_tensors :]
    grads, learned = attention_backward_op(grad, saved, saved_kv, visible, out, lse, *heads, learns, *code)
    learned = [part if each else None for part, each in zip(learned, wanted, strict=True)]
    # What was saved is needed no more, and goes before the buffers of the way home come: they would be the peak (unless the graph is kept).
    del lse, saved_kv, visible, out, rest, code, saved
    ctx.maybe_clear_saved_tensors()
    static = static_part(ctx.code.options)
    dq, dk, dv = gradients_home(grads, *heads, static.ulysses_group, static.options.ulysses_stages)
    return _in_order(q=dq, k=dk, v=dv, tensors=learned)


def _by_name(values: tuple[Any, ...]) -> dict[str, Any]:
    """Return what belongs to the operator's arguments by their names."""
    return dict(zip(_names(), values, strict=True))


def _in_order(**gradients: Any) -> tuple[Any, ...]:
    """Return gradients in the order of the operator's arguments, None for those without one."""
    return tuple(map(gradients.get, _names()))


@lru_cache(maxsize=1)
def _names() -> tuple[str, ...]:
    return tuple(argument.name for argument in attention_op._opoverload._schema.arguments)


attention_op.register_autograd(_backward, setup_context=_save)


def gradients_home(
    grads: list[Tensor], num_heads: int, num_kv_heads: int, ulysses_group: str, num_stages: int
) -> list[Tensor]:
    """Send the gradients of this rank's heads to the ranks of their tokens, stage by stage. The list is emptied.

    An operator for the exchange alone: what it is given lives until it returns, so that around it each buffer goes before the next comes.

    Shapes: for each stage (B, h, S, D), (B, k, T, D) twice -> (B, H, s, D), (B, K, t, D) twice.
    Communicates: one all_to_all_single for each stage (Ulysses).
    """
    if not ulysses_group:
        return grads
    split = Ulysses.of(ulysses_group, num_heads, num_kv_heads, num_stages).split
    batch, _, queries, dim = grads[0].shape
    keys, whole = grads[1].shape[2], list[Tensor]()
    for stage in split.each_stage():
        of_stage = [grads.pop(0) for _ in range(3)]
        if keys == queries:
            packed, received = pack_gradients(of_stage), gradient_counts(stage, batch, queries, dim)
        else:
            packed = pack_cross_gradients(of_stage, split.size)
            received = cross_counts(stage, batch, queries, keys, dim)
        home = exchange_gradients_op(packed, received, ulysses_group)
        del packed
        if not whole:
            shapes = ((queries, num_heads), (keys, num_kv_heads), (keys, num_kv_heads))
            whole = [home.new_empty(batch, n // split.size, heads, dim).transpose(1, 2) for n, heads in shapes]
        (lay_gradients if keys == queries else lay_cross_gradients)(home, stage, whole)
        del home
    return whole


def _passes(ulysses: Ulysses, saved_kv: Tensor) -> list[tuple[HeadSplit, Tensor | None]]:
    """Return the passes round the ring, each with where its arriving keys stay for the backward; None where they do not."""
    passes = ulysses.split.passes()
    if not saved_kv.numel():
        return [(each, None) for each in passes]
    parts = whole_parts(saved_kv, [length(each.keys(ulysses.rank)) for each in passes])
    return list(zip(passes, parts, strict=True))


def _query_heads(
    q: Tensor, stage: HeadSplit, one_pass: HeadSplit, ulysses: Ulysses, spec: AttentionSpec, kernel: Kernel
) -> QueryHeads:
    """Return the query heads of a stage, with what of the pass' keys is theirs. Shapes: q (B, h, S, D)."""
    rank = ulysses.rank
    heads, keys = stage.queries(rank), stage.keys(rank)
    first, first_kv = ulysses.queries[0], one_pass.keys(rank)[0]
    return QueryHeads(
        q=q,
        kernel=BlockKernel(kernel, spec.scale, stage.head_groups(rank)),
        heads=(heads[0] - first, heads[1] - first),
        keys=(keys[0] - first_kv, keys[1] - first_kv),
        sinks=None if spec.sinks is None else spec.sinks[slice(*heads)],
    )


def _no_heads(k: Tensor) -> Tensor:
    """Return the gradient of no key-value head. Shapes: (B, K, T, D) -> (B, 0, T, D)."""
    return k.new_empty(k.shape[0], 0, *k.shape[2:])


def _token_major(tensor: Tensor) -> Tensor:
    """Fix the strides that the fake implementation promises: (B, H, S, D) over (B, S, H, D) memory; kernels return that already."""
    return tensor if tensor.dim() != 4 else tensor.transpose(1, 2).contiguous().transpose(1, 2)


def _plan(
    spec: AttentionSpec, ulysses: Ulysses, q: Tensor, sizes: tuple[int, int], visible: Tensor | None = None
) -> Plan:
    """Return the plan of what the runs of a mask and the map of the rest leave visible.

    Args:
        spec: of the attention.
        ulysses: who exchanges heads.
        q: queries, for their rows and device.
        sizes: query and key tokens of a ring rank.
        visible: the map; None or empty where nothing is searched.
    """
    ring_size = comm.size_of(comm.group_by_name(spec.ring_group))
    total, keys = (tokens * ring_size for tokens in sizes)
    layout = SequenceLayout.from_table(ring_size, ulysses.size, spec.layout_table)
    blocks = None if visible is None else of_map(visible, total, keys)
    return plan_of(spec.mask, layout, total, q.shape[0], keys, blocks, tile_on(q.device.type))


def _at_once(ring: Ring, k: Tensor) -> bool:
    rows, heads, _, dim = k.shape
    token_bytes = 2 * rows * heads * dim * k.element_size()
    return uses_all_gather(ring, token_bytes=token_bytes, device_type=k.device.type)


def _ring(plan: Plan, spec: AttentionSpec, ulysses: Ulysses) -> Ring:
    group = comm.group_by_name(spec.ring_group)
    heads = ulysses.queries if spec.scores.names() else None
    return Ring(plan, comm.rank_in(group), group, heads, spec.options)
