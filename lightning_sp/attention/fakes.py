"""What the attention's operators return, and their fake implementations: shapes, strides and dtypes without data, for torch.compile."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_sp import comm
from lightning_sp.attention.kernels.merge import empty_token_major
from lightning_sp.attention.plan.block_sparsity import empty_map
from lightning_sp.attention.schemes.head_split import length
from lightning_sp.attention.schemes.stages import empty_exchanged
from lightning_sp.attention.schemes.transport import empty_saved_kv
from lightning_sp.attention.schemes.ulysses import Ulysses
from lightning_sp.attention.spec.codec import Code, empty_gradients, static_part


class Outputs(NamedTuple):
    """What the forward returns; all of it is for the backward, `out` also for the caller, and empty where it is not needed.

    S, T: query and key tokens of this ring rank, h, k: heads of this Ulysses rank. With `ulysses_stages` the three in the middle are memory in
    which the parts of stages lie one after the other, each whole (`stages.whole_parts`).

    Args:
        out: of this rank's tokens, (B, H, s, D).
        lse: of this rank's heads, (B, h, S).
        exchanged: with Ulysses, q, k and v (S, B, h + 2 k, D); in cross attention q alone (S, B, h, D).
        exchanged_kv: with Ulysses in cross attention, k and v (T, B, 2 k, D).
        saved_kv: keys and values that arrived round the ring, where they are saved, ((R-1) T, 2, B, k, D).
        visible: map of the blocks of which a matrix or a function leaves something visible.
    """

    out: Tensor
    lse: Tensor
    exchanged: Tensor
    exchanged_kv: Tensor
    saved_kv: Tensor
    visible: Tensor


def fake_forward(
    q: Tensor, k: Tensor, v: Tensor, numbers: list[int], factors: list[float], tensors: list[Tensor], options: str
) -> tuple[Tensor, ...]:
    """Return `Outputs` without data."""
    static = static_part(options)
    ulysses = Ulysses.of(static.ulysses_group, q.shape[1], k.shape[1], static.options.ulysses_stages)
    batch, _, tokens, _ = q.shape
    total, heads = tokens * ulysses.size, length(ulysses.queries)
    ring_size = comm.size_of(comm.group_by_name(static.ring_group))
    exchanged = empty_exchanged(q, k, ulysses)
    exchanged += [q.new_empty(0) for _ in range(2 - len(exchanged))]
    return Outputs(
        out=empty_token_major(q, q.dtype),
        lse=q.new_empty((batch, heads, total), dtype=torch.promote_types(q.dtype, torch.float32)),
        exchanged=exchanged[0],
        exchanged_kv=exchanged[1],
        saved_kv=empty_saved_kv(
            k,
            ring_size if static.options.ring_saves_kv else 1,
            heads=length(ulysses.keys),
            tokens=k.shape[2] * ulysses.size,
        ),
        visible=empty_map(Code(numbers, factors, tensors, options), ring_size * ulysses.size),
    )


def fake_backward(
    grad: Tensor, saved: list[Tensor], saved_kv: Tensor, visible: Tensor, out: Tensor, lse: Tensor,
    num_heads: int, num_kv_heads: int, learns: bool,
    numbers: list[int], factors: list[float], tensors: list[Tensor], options: str,
) -> tuple[list[Tensor], list[Tensor]]:  # fmt: skip
    """Return (dq, dk, dv of each stage; gradients of the code's tensors) without data."""
    static = static_part(options)
    ulysses = Ulysses.of(static.ulysses_group, num_heads, num_kv_heads, static.options.ulysses_stages)
    batch, _, tokens, dim = grad.shape
    # In cross attention k and v have tokens of their own: of the local ones, or of the exchanged.
    keys = saved[1].shape[2] if ulysses.group is None else saved[-1].shape[0]
    made = []
    for stage in ulysses.split.each_stage():
        heads, kv_heads = length(stage.queries(ulysses.rank)), length(stage.travelling(ulysses.rank))
        for number, of in ((tokens * ulysses.size, heads), (keys, kv_heads), (keys, kv_heads)):
            made.append(grad.new_empty(batch, number, of, dim).transpose(1, 2))
    return made, empty_gradients(Code(numbers, factors, tensors, options), learns=learns)


def fake_gradients(packed: Tensor, received: list[int], ulysses_group: str) -> Tensor:
    """Return the exchanged gradients without data."""
    return packed.new_empty(sum(received))
