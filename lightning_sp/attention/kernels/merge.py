"""The blocks of a ring step through the local kernel, and their partial results merged by log-sum-exp.

    lse = log(exp(lse_1) + exp(lse_2)),   out = (exp(lse_1) out_1 + exp(lse_2) out_2) / exp(lse) = lerp(out_1, out_2, sigmoid(lse_2 - lse_1))

Everything a device computes is below this file, everything that travels in `schemes`: a test can emulate all ranks in one process through the
same functions. B batch, H query heads, K key-value heads, S local tokens, D head dim.
Source: FlashAttention-2, arXiv:2307.08691, section 3.1.3 (split keys); the sigmoid form needs one pass over `out`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sp.attention.kernels.kernel import Kernel
from lightning_sp.attention.kernels.varlen import Call, PackedKernel, backward_calls, calls_of, forward_calls
from lightning_sp.attention.plan.blocks import Block, Kind
from lightning_sp.attention.plan.intervals import Range
from lightning_sp.attention.spec.accumulator import accumulator_dtype
from lightning_sp.attention.spec.positions import ScorePositions


@dataclass(frozen=True)
class HeadGroup:
    """Local query heads that share local key-value heads evenly, so that one GQA call serves them."""

    queries: Range
    keys: Range


@dataclass(frozen=True)
class BlockKernel:
    """The local kernel with what is the same for all its calls."""

    kernel: Kernel
    scale: float
    head_groups: tuple[HeadGroup, ...]

    def computes_together(self, blocks: Sequence[Block]) -> bool:
        """Return whether the kernel computes all blocks of a kind in one call, and that is fewer calls."""
        return len({block.kind for block in blocks}) < len(blocks) and isinstance(self.kernel, PackedKernel)

    def together(
        self, blocks: Sequence[Block], q: Tensor
    ) -> tuple[PackedKernel, float, list[tuple[Range, Range]], tuple[Call, ...]]:
        """Return what `forward_calls` and `backward_calls` take for the blocks of a step."""
        assert isinstance(self.kernel, PackedKernel)
        groups = [(group.queries, group.keys) for group in self.head_groups]
        return self.kernel, self.scale, groups, calls_of(tuple(blocks), q.shape[0], q.device)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, kind: Kind, positions: ScorePositions | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return (out, lse) of one block. Shapes: (B, H, Sq, D), (B, K, Sk, D) twice -> (B, H, Sq, D), (B, H, Sq)."""
        if kind is Kind.ANTICAUSAL:
            # Read backwards, query i sees the keys up to the i-th.
            flipped = positions.flipped() if positions is not None else None
            out, lse = self.forward(q.flip(2), k.flip(2), v.flip(2), Kind.CAUSAL, flipped)
            return out.flip(2), lse.flip(2)
        parts = [
            self.kernel.forward(
                of_heads(q, g.queries),
                of_heads(k, g.keys),
                of_heads(v, g.keys),
                causal=kind is Kind.CAUSAL,
                scale=self.scale,
                positions=positions.of_heads(g.queries) if positions is not None else None,
            )
            for g in self.head_groups
        ]
        if len(parts) == 1:
            return parts[0]
        return torch.cat([out for out, _ in parts], 1), torch.cat([lse for _, lse in parts], 1)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, kind: Kind, positions: ScorePositions | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return (dq, dk, dv) of one block from the global out and lse."""
        if kind is Kind.ANTICAUSAL:
            grad, q, k, v, out, lse = (t.flip(2) for t in (grad, q, k, v, out, lse))
            flipped = positions.flipped() if positions is not None else None
            dq, dk, dv = self.backward(grad, q, k, v, out, lse, Kind.CAUSAL, flipped)
            return dq.flip(2), dk.flip(2), dv.flip(2)
        parts = []
        for g in self.head_groups:
            parts.append(
                self.kernel.backward(
                    *(of_heads(each, g.queries) for each in (grad, q)),
                    *(of_heads(each, g.keys) for each in (k, v)),
                    *(of_heads(each, g.queries) for each in (out, lse)),
                    causal=kind is Kind.CAUSAL,
                    scale=self.scale,
                    positions=positions.of_heads(g.queries) if positions is not None else None,
                )
            )
        if len(parts) == 1:
            return parts[0]
        dk, dv = torch.zeros_like(k), torch.zeros_like(v)
        for g, (_, dk_part, dv_part) in zip(self.head_groups, parts, strict=True):
            # Neighbouring groups may share a key-value head: their gradients add.
            dk[:, slice(*g.keys)] += dk_part
            dv[:, slice(*g.keys)] += dv_part
        return torch.cat([dq for dq, _, _ in parts], 1), dk, dv


def forward_step(
    kernel: BlockKernel,
    blocks: Sequence[Block],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    running: tuple[Tensor, Tensor] | None,
    positions: ScorePositions | None = None,
) -> tuple[Tensor, Tensor]:
    """Add one source rank's keys to the running partials, in place, and return them.

    Args:
        kernel: the local kernel.
        blocks: plan of this step, keys numbered as they lie in `k`.
        q: local queries, (B, H, S, D).
        k: keys that travelled, (B, K, n, D).
        v: values likewise.
        running: (out, lse), None in the first step; a query without a visible key so far has 0 and -inf. It is in the accumulator's dtype, or in
            that of q as long as one block has been all: where nothing is added, nothing is cast.
        positions: where queries and keys lie, for a kernel that asks.
    """
    first, dtype = running is None, accumulator_dtype(q.dtype)
    if running is None:
        if _is_whole(blocks, q):
            keys = slice(*blocks[0].keys)
            return kernel.forward(q, k[:, :, keys], v[:, :, keys], blocks[0].kind, _part(positions, blocks[0]))
        running = (empty_token_major(q, dtype).zero_(), q.new_full(q.shape[:3], -math.inf, dtype=dtype))
    if blocks:
        running = (running[0].to(dtype), running[1])
    if kernel.computes_together(blocks):
        for here, out, lse in forward_calls(*kernel.together(blocks, q), q, k, v):
            merged, merged_lse = running[0][here], running[1][here]
            merge_into(merged, merged_lse, out, lse)
            running[0][here], running[1][here] = merged, merged_lse
        return running
    for block in blocks:
        queries, keys, row = _slices(block)
        out, lse = kernel.forward(
            q[row, :, queries], k[row, :, keys], v[row, :, keys], block.kind, _part(positions, block)
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
    positions: ScorePositions | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq with this step's part added in place, dk, dv of the keys given).

    Args:
        kernel: the local kernel.
        blocks: plan of this step, keys numbered as they lie in `kv`.
        saved: (gradient of out, q, out, lse) of the local queries, out and lse global.
        kv: keys and values that travelled, (B, K, n, D).
        dq: running gradient of q, None in the first step; its dtype as that of `forward_step`'s running out.
        positions: where queries and keys lie, for a kernel that asks.
    """
    grad, q, out, lse = saved
    k, v = kv
    if dq is None and _is_whole(blocks, q) and blocks[0].keys == (0, k.shape[2]):
        return kernel.backward(grad, q, k, v, out, lse, blocks[0].kind, _part(positions, blocks[0]))
    dtype = accumulator_dtype(q.dtype)
    dq = torch.zeros_like(q, dtype=dtype) if dq is None else dq.to(dtype)
    if len(blocks) == 1 and blocks[0].row is None and blocks[0].keys == (0, k.shape[2]):
        queries = slice(*blocks[0].queries)
        part, dk, dv = kernel.backward(
            grad[:, :, queries], q[:, :, queries], k, v, out[:, :, queries], lse[:, :, queries], blocks[0].kind,
            _part(positions, blocks[0]),
        )  # fmt: skip
        dq[:, :, queries] += part
        return dq, dk, dv
    if kernel.computes_together(blocks):
        dk, dv = backward_calls(*kernel.together(blocks, q), saved, kv, dq)
        return dq, dk.to(k.dtype), dv.to(v.dtype)
    # Blocks share keys where windows overlap: sums, in no less than float32.
    dk, dv = (torch.zeros_like(t, dtype=accumulator_dtype(t.dtype)) for t in (k, v))
    for block in blocks:
        queries, keys, row = _slices(block)
        part, dk_part, dv_part = kernel.backward(
            grad[row, :, queries], q[row, :, queries], k[row, :, keys], v[row, :, keys],
            out[row, :, queries], lse[row, :, queries], block.kind, _part(positions, block),
        )  # fmt: skip
        dq[row, :, queries] += part
        dk[row, :, keys] += dk_part
        dv[row, :, keys] += dv_part
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def merge_into(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Merge a block's partial into the running (out, lse), in place; a row without a visible key so far has 0 and -inf.

    Shapes: out, block_out (B, H, S, D); lse, block_lse (B, H, S), natural logarithm.
    """
    # Where neither has a visible key, -inf - -inf is not a number: the running partial stays.
    weight = torch.sigmoid(
        (block_lse - lse).nan_to_num_(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    ).unsqueeze(-1)
    out.lerp_(block_out.to(out.dtype), weight.to(out.dtype).expand_as(out))
    torch.logaddexp(lse, block_lse, out=lse)


def of_heads(tensor: Tensor, heads: Range) -> Tensor:
    """Return some heads as a view, or the tensor itself where these are all. Shapes: (B, H, ...) -> (B, h, ...)."""
    return tensor if heads == (0, tensor.shape[1]) else tensor[:, slice(*heads)]


def empty_token_major(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an empty tensor of the same shape (B, H, S, D), laid out as kernels return theirs: (B, S, H, D)."""
    batch, heads, tokens, dim = like.shape
    return like.new_empty((batch, tokens, heads, dim), dtype=dtype).transpose(1, 2)


def _is_whole(blocks: Sequence[Block], q: Tensor) -> bool:
    """Return whether one block holds every query."""
    return len(blocks) == 1 and blocks[0].row is None and blocks[0].queries == (0, q.shape[2])


def _part(positions: ScorePositions | None, block: Block) -> ScorePositions | None:
    if positions is None:
        return None
    return positions.part(row=block.row, queries=slice(*block.queries), keys=slice(*block.keys))


def _slices(block: Block) -> tuple[slice, slice, slice]:
    row = slice(None) if block.row is None else slice(block.row, block.row + 1)
    return slice(*block.queries), slice(*block.keys), row
