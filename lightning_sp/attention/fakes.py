"""What the attention's operators return, and their fake implementations: shapes, strides and dtypes without data, for torch.compile."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_sp import comm
from lightning_sp.attention.kernels.merge import empty_token_major
from lightning_sp.attention.plan.block_sparsity import empty_map
from lightning_sp.attention.schemes.transport import empty_saved_kv
from lightning_sp.attention.schemes.ulysses import Ulysses
from lightning_sp.attention.spec.codec import Code, empty_gradients, static_part


class Outputs(NamedTuple):
    """What the forward returns; all but `out` is for the backward, and empty where it is not needed.

    S, T: query and key tokens of this ring rank, h, k: heads of this Ulysses rank.

    Args:
        out: of this rank's tokens, (B, H, s, D).
        lse: of this rank's heads, (B, h, S).
        heads_out: with Ulysses, out of this rank's heads, (B, h, S, D).
        exchanged: with Ulysses, q, k and v (S, B, h + 2 k, D); in cross attention q alone (S, B, h, D).
        exchanged_kv: with Ulysses in cross attention, k and v (T, B, 2 k, D).
        saved_kv: keys and values that arrived round the ring, where they are saved, ((R-1) T, 2, B, k, D).
        visible: map of the blocks of which a matrix or a function leaves something visible.
    """

    out: Tensor
    lse: Tensor
    heads_out: Tensor
    exchanged: Tensor
    exchanged_kv: Tensor
    saved_kv: Tensor
    visible: Tensor


def fake_forward(
    q: Tensor, k: Tensor, v: Tensor, numbers: list[int], factors: list[float], tensors: list[Tensor], options: str
) -> tuple[Tensor, ...]:
    """Return `Outputs` without data."""
    static = static_part(options)
    ulysses = Ulysses.of(static.ulysses_group, q.shape[1], k.shape[1])
    batch, _, tokens, dim = q.shape
    total = tokens * ulysses.size
    heads = ulysses.queries[1] - ulysses.queries[0]
    ring_size = comm.size_of(comm.group_by_name(static.ring_group))
    heads_out, exchanged, exchanged_kv, keys = q.new_empty(0), q.new_empty(0), q.new_empty(0), k
    if ulysses.group is not None:
        first, last = ulysses.split.keys(ulysses.rank)
        keys = k.new_empty(batch, last - first, k.shape[2] * ulysses.size, dim)
        heads_out = q.new_empty(batch, total, heads, dim).transpose(1, 2)
        width = ulysses.split.width(ulysses.rank)
        if k.shape[2] == tokens:
            exchanged = q.new_empty(total, batch, width, dim)
        else:
            exchanged = q.new_empty(total, batch, heads, dim)
            exchanged_kv = q.new_empty(k.shape[2] * ulysses.size, batch, width - heads, dim)
    return Outputs(
        out=empty_token_major(q, q.dtype),
        lse=q.new_empty((batch, heads, total), dtype=torch.promote_types(q.dtype, torch.float32)),
        heads_out=heads_out,
        exchanged=exchanged,
        exchanged_kv=exchanged_kv,
        saved_kv=empty_saved_kv(keys, ring_size if static.options.ring_saves_kv else 1),
        visible=empty_map(Code(numbers, factors, tensors, options), ring_size * ulysses.size),
    )


def fake_backward(
    grad: Tensor, saved: list[Tensor], saved_kv: Tensor, visible: Tensor, out: Tensor, lse: Tensor,
    num_heads: int, num_kv_heads: int, learns: bool,
    numbers: list[int], factors: list[float], tensors: list[Tensor], options: str,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:  # fmt: skip
    """Return (dq, dk, dv, gradients of the code's tensors) without data."""
    ulysses = Ulysses.of(static_part(options).ulysses_group, num_heads, num_kv_heads)
    batch, _, tokens, dim = grad.shape
    # In cross attention k and v have tokens of their own: of the local ones, or of the exchanged.
    keys = saved[1].shape[2] if ulysses.group is None else saved[-1].shape[0]
    (first, last), (first_kv, last_kv) = ulysses.queries, ulysses.split.keys(ulysses.rank)
    dq = grad.new_empty(batch, tokens * ulysses.size, last - first, dim).transpose(1, 2)
    dk, dv = (grad.new_empty(batch, keys, last_kv - first_kv, dim).transpose(1, 2) for _ in (0, 1))
    return dq, dk, dv, empty_gradients(Code(numbers, factors, tensors, options), learns=learns)


def fake_gradients(packed: Tensor, received: list[int], ulysses_group: str) -> Tensor:
    """Return the exchanged gradients without data."""
    return packed.new_empty(sum(received))
