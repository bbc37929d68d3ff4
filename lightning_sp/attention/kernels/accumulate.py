"""A ring step on one rank: the blocks of a plan through the local kernel, merged into the running partials.

Everything a device computes is here, everything that travels in `schemes`: a test can emulate all ranks in one process through the same
functions. B batch, H query heads, K key-value heads, S local tokens, D head dim.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_sp.attention.kernels.block_kernel import BlockKernel
from lightning_sp.attention.kernels.varlen import backward_calls, forward_calls
from lightning_sp.attention.plan.blocks import Block
from lightning_sp.attention.spec.merge import accumulator_dtype, merge_into
from lightning_sp.attention.spec.positions import ScorePositions


def forward_step(
    kernel: BlockKernel,
    blocks: Sequence[Block],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    running: tuple[Tensor, Tensor] | None,
    places: ScorePositions | None = None,
) -> tuple[Tensor, Tensor]:
    """Add one source rank's keys to the running partials, in place, and return them.

    Args:
        kernel: the local kernel.
        blocks: plan of this step, keys numbered as they lie in `k`.
        q: local queries, (B, H, S, D).
        k: keys that travelled, (B, K, n, D).
        v: values likewise.
        running: (out, lse), None in the first step; a query that has seen no key has 0 and -inf. It is in the accumulator's dtype, or in
            that of q as long as one block has been all: where nothing is added, nothing is cast.
        places: where queries and keys lie, for a kernel that asks.
    """
    first, dtype = running is None, accumulator_dtype(q.dtype)
    if running is None:
        if _is_whole(blocks, q):
            keys = slice(*blocks[0].keys)
            return kernel.forward(q, k[:, :, keys], v[:, :, keys], blocks[0].kind, _part(places, blocks[0]))
        running = (empty_token_major(q, dtype).zero_(), q.new_full(q.shape[:3], -math.inf, dtype=dtype))
    if blocks:
        running = (running[0].to(dtype), running[1])
    if kernel.takes_together(blocks):
        forward_calls(*kernel.together(blocks, q), q, k, v, running)
        return running
    for block in blocks:
        queries, keys, row = _slices(block)
        out, lse = kernel.forward(
            q[row, :, queries], k[row, :, keys], v[row, :, keys], block.kind, _part(places, block)
        )
        if first and block.opens:
            running[0][row, :, queries] = out
            running[1][row, :, queries] = lse
        else:
            merge_into(running[0][row, :, queries], running[1][row, :, queries], out, lse)
    return running


def backward_step(
    kernel: BlockKernel,
    blocks: Sequence[Block],
    saved: tuple[Tensor, Tensor, Tensor, Tensor],
    kv: tuple[Tensor, Tensor],
    dq: Tensor | None,
    places: ScorePositions | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq with this step's part added in place, dk, dv of the keys given).

    Args:
        kernel: the local kernel.
        blocks: plan of this step, keys numbered as they lie in `kv`.
        saved: (gradient of out, q, out, lse) of the local queries, out and lse global.
        kv: keys and values that travelled, (B, K, n, D).
        dq: running gradient of q, None in the first step; its dtype as that of `forward_step`'s running out.
        places: where queries and keys lie, for a kernel that asks.
    """
    grad, q, out, lse = saved
    k, v = kv
    if dq is None and _is_whole(blocks, q) and blocks[0].keys == (0, k.shape[2]):
        return kernel.backward(grad, q, k, v, out, lse, blocks[0].kind, _part(places, blocks[0]))
    dtype = accumulator_dtype(q.dtype)
    dq = torch.zeros_like(q, dtype=dtype) if dq is None else dq.to(dtype)
    if len(blocks) == 1 and blocks[0].row is None and blocks[0].keys == (0, k.shape[2]):
        queries = slice(*blocks[0].queries)
        part, dk, dv = kernel.backward(
            grad[:, :, queries], q[:, :, queries], k, v, out[:, :, queries], lse[:, :, queries], blocks[0].kind,
            _part(places, blocks[0]),
        )  # fmt: skip
        dq[:, :, queries] += part
        return dq, dk, dv
    if kernel.takes_together(blocks):
        dk, dv = backward_calls(*kernel.together(blocks, q), saved, kv, dq)
        return dq, dk.to(k.dtype), dv.to(v.dtype)
    # Blocks share keys where windows overlap: sums, in no less than float32.
    dk, dv = (torch.zeros_like(t, dtype=accumulator_dtype(t.dtype)) for t in (k, v))
    for block in blocks:
        queries, keys, row = _slices(block)
        part, dk_part, dv_part = kernel.backward(
            grad[row, :, queries], q[row, :, queries], k[row, :, keys], v[row, :, keys],
            out[row, :, queries], lse[row, :, queries], block.kind, _part(places, block),
        )  # fmt: skip
        dq[row, :, queries] += part
        dk[row, :, keys] += dk_part
        dv[row, :, keys] += dv_part
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def empty_token_major(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an empty tensor of the same shape (B, H, S, D), laid out as kernels return theirs: (B, S, H, D)."""
    batch, heads, tokens, dim = like.shape
    return like.new_empty((batch, tokens, heads, dim), dtype=dtype).transpose(1, 2)


def _is_whole(blocks: Sequence[Block], q: Tensor) -> bool:
    """Return whether one block holds every query."""
    return len(blocks) == 1 and blocks[0].row is None and blocks[0].queries == (0, q.shape[2])


def _part(places: ScorePositions | None, block: Block) -> ScorePositions | None:
    if places is None:
        return None
    return places.part(row=block.row, queries=slice(*block.queries), keys=slice(*block.keys))


def _slices(block: Block) -> tuple[slice, slice, slice]:
    row = slice(None) if block.row is None else slice(block.row, block.row + 1)
    return slice(*block.queries), slice(*block.keys), row
