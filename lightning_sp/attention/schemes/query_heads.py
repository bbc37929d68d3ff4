"""Query heads that a kernel computes together: all of a rank's, or those of a stage of Ulysses, which share keys with other stages.

A pass round the ring brings the keys and values of all its parts once; each part takes those of its heads.

B batch, h query heads of a part, S local queries, K key-value heads of the pass, n keys that travelled, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sp.attention.kernels.merge import BlockKernel, backward_step, forward_step, of_heads
from lightning_sp.attention.plan.blocks import Block
from lightning_sp.attention.plan.intervals import Range
from lightning_sp.attention.spec.accumulator import accumulator_dtype
from lightning_sp.attention.spec.positions import ScorePositions
from lightning_sp.attention.spec.sinks import add_sinks


@dataclass(frozen=True, kw_only=True)
class QueryHeads:
    """Some query heads of this rank.

    Args:
        q: their queries, (B, h, S, D).
        kernel: the local kernel, with the groups of these heads.
        heads: their numbers among this rank's.
        keys: their key-value heads among those of the pass.
        sinks: score of each head's sink, (h,), or None.
    """

    q: Tensor
    kernel: BlockKernel
    heads: Range
    keys: Range
    sinks: Tensor | None = None

    def forward(
        self,
        blocks: Sequence[Block],
        kv: tuple[Tensor, Tensor],
        running: tuple[Tensor, Tensor] | None,
        positions: ScorePositions | None,
    ) -> tuple[Tensor, Tensor]:
        """Return `forward_step` of these heads. Shapes: kv (B, K, n, D) twice; positions of all heads of the rank."""
        return forward_step(self.kernel, blocks, self.q, *self.of_keys(kv), running, self.positions(positions))

    def finished(self, running: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return (out, lse) with the sinks, out in the dtype of q. Shapes: (B, h, S, D), (B, h, S)."""
        out, lse = running if self.sinks is None else add_sinks(*running, self.sinks)
        return out.to(self.q.dtype), lse

    def of_keys(self, kv: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the keys and values of these heads, as views."""
        return of_heads(kv[0], self.keys), of_heads(kv[1], self.keys)

    def positions(self, of_rank: ScorePositions | None) -> ScorePositions | None:
        """Return where the scores of these heads lie; None where the kernel does not ask."""
        return None if of_rank is None else of_rank.of_heads(self.heads)


@dataclass(frozen=True, kw_only=True)
class SavedHeads:
    """Query heads with what their backward needs: the gradient of out, and the global out and lse.

    Shapes: grad and out (B, h, S, D), lse (B, h, S).
    """

    queries: QueryHeads
    grad: Tensor
    out: Tensor
    lse: Tensor

    def backward(
        self,
        blocks: Sequence[Block],
        kv: tuple[Tensor, Tensor],
        dq: Tensor | None,
        positions: ScorePositions | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return `backward_step` of these heads. Shapes: as in `QueryHeads.forward`."""
        own, saved = self.queries, (self.grad, self.queries.q, self.out, self.lse)
        return backward_step(own.kernel, blocks, saved, own.of_keys(kv), dq, own.positions(positions))


def backward_of_parts(
    parts: Iterable[SavedHeads],
    blocks: Sequence[Block],
    kv: tuple[Tensor, Tensor],
    dq: list[Tensor],
    positions: ScorePositions | None,
) -> tuple[Tensor, Tensor]:
    """Add a step to each part's dq, in the list, and return (dk, dv) of the keys given, of all parts' queries.

    Args:
        parts: query heads that share the keys.
        blocks: plan of the step.
        kv: keys and values that travelled, (B, K, n, D) twice.
        dq: running gradient of each part's q; empty in the first step.
        positions: where the scores of the rank's heads lie.
    """
    is_first, sums = not dq, tuple[Tensor, ...]()
    for number, part in enumerate(parts):
        running, dk, dv = part.backward(blocks, kv, None if is_first else dq[number], positions)
        dq[number : number + 1] = [running]
        if not number and part.queries.keys == (0, kv[0].shape[1]):
            sums = (dk, dv)
            continue
        # Parts share heads of keys: sums, in no less than float32.
        sums = tuple(t.to(accumulator_dtype(t.dtype)) for t in sums or map(torch.zeros_like, kv))
        for whole, share in zip(sums, (dk, dv), strict=True):
            whole[:, slice(*part.queries.keys)] += share
        del dk, dv, share  # before the next part's come
    dk, dv = (total.to(t.dtype) for total, t in zip(sums, kv, strict=True))
    return dk, dv
