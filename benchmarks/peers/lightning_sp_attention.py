"""This project. Variants: ULYSSESxRING, and "ULYSSESxRING network" for a ring without shared memory."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from benchmarks.instruments.traffic import ring_options
from lightning_sp.attention import AttentionMask, sequence_parallel_attention
from lightning_sp.layout import shard
from lightning_sp.mesh import SequenceMesh, build_device_mesh


def build(variant: str, problem: dict[str, Any], rank: int, world: int) -> Any:
    """Return (attend, shard)."""
    degrees, *transport = variant.split()
    ulysses, ring = map(int, degrees.split("x"))
    base = build_device_mesh("cpu", data_parallel_size=1, sequence_parallel_size=world)
    mesh = SequenceMesh.build(base, ring_size=ring, ulysses_size=ulysses)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        ways = ring_options(transport[0] if transport else "auto")
        out = sequence_parallel_attention(q, k, v, mesh=mesh, mask=AttentionMask(), **ways)
        return out.transpose(1, 2)

    return attend, lambda t: shard(t, mesh.layout, mesh.sequence_rank, dim=1)
