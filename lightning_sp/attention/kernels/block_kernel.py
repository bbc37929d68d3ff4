"""One block through the local kernel, whatever its kind and however its heads are grouped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sp.attention.kernels.kernel import Kernel
from lightning_sp.attention.kernels.varlen import Call, PackedKernel, calls_of
from lightning_sp.attention.plan.blocks import Block, Kind
from lightning_sp.attention.plan.intervals import Range
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

    def takes_together(self, blocks: Sequence[Block]) -> bool:
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
        self, q: Tensor, k: Tensor, v: Tensor, kind: Kind, places: ScorePositions | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return (out, lse) of one block. Shapes: (B, H, Sq, D), (B, K, Sk, D) twice -> (B, H, Sq, D), (B, H, Sq)."""
        if kind is Kind.ANTICAUSAL:
            # Read backwards, query i sees the keys up to the i-th.
            flipped = places.flipped() if places is not None else None
            out, lse = self.forward(q.flip(2), k.flip(2), v.flip(2), Kind.CAUSAL, flipped)
            return out.flip(2), lse.flip(2)
        parts = [
            self.kernel.forward(
                q[:, slice(*g.queries)],
                k[:, slice(*g.keys)],
                v[:, slice(*g.keys)],
                causal=kind is Kind.CAUSAL,
                scale=self.scale,
                places=places.of_heads(g.queries) if places is not None else None,
            )
            for g in self.head_groups
        ]
        if len(parts) == 1:
            return parts[0]
        return torch.cat([out for out, _ in parts], 1), torch.cat([lse for _, lse in parts], 1)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, kind: Kind, places: ScorePositions | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return (dq, dk, dv) of one block from the global out and lse."""
        if kind is Kind.ANTICAUSAL:
            grad, q, k, v, out, lse = (t.flip(2) for t in (grad, q, k, v, out, lse))
            flipped = places.flipped() if places is not None else None
            dq, dk, dv = self.backward(grad, q, k, v, out, lse, Kind.CAUSAL, flipped)
            return dq.flip(2), dk.flip(2), dv.flip(2)
        parts = []
        for g in self.head_groups:
            heads, kv = slice(*g.queries), slice(*g.keys)
            parts.append(
                self.kernel.backward(
                    grad[:, heads],
                    q[:, heads],
                    k[:, kv],
                    v[:, kv],
                    out[:, heads],
                    lse[:, heads],
                    causal=kind is Kind.CAUSAL,
                    scale=self.scale,
                    places=places.of_heads(g.queries) if places is not None else None,
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
