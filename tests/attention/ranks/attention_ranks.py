"""What each rank runs in test_attention_law.py: importable by name in the spawned processes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.instruments.traffic import ring_options
from lightning_sp.attention import (
    AttentionDropout,
    ScoreMod,
    alibi,
    relative_position_bias,
    sequence_parallel_attention,
)
from lightning_sp.attention.reference import reference_attention
from lightning_sp.layout import merge, pad, shard
from lightning_sp.mesh import SequenceMesh, build_device_mesh
from tests.drawn_cases import masks

_meshes: dict[tuple[int, int], SequenceMesh] = {}


def mesh_of(ulysses: int, ring: int) -> SequenceMesh:
    """Build each mesh once in a process: groups are a scarce resource."""
    if (ulysses, ring) not in _meshes:
        world = dist.get_world_size()
        base = build_device_mesh(
            "cpu", data_parallel_size=world // (ulysses * ring), sequence_parallel_size=ulysses * ring
        )
        _meshes[ulysses, ring] = SequenceMesh.build(base, ring_size=ring, ulysses_size=ulysses)
    return _meshes[ulysses, ring]


def inputs(heads, kv_heads, length, batch=2, dim=8, dtype=torch.float64, seed=0, dim_v=None, keys=None):
    g = torch.Generator().manual_seed(seed)
    dim_v = dim if dim_v is None else dim_v
    keys = length if keys is None else keys
    shapes = [
        (batch, heads, length, dim),
        (batch, kv_heads, keys, dim),
        (batch, kv_heads, keys, dim_v),
        (batch, heads, length, dim_v),
    ]
    return [torch.randn(shape, generator=g, dtype=torch.float64).to(dtype) for shape in shapes]


# By what a bias differs: its shape for H heads, S queries, T keys.
BIASES = {
    "whole": lambda heads, length, keys: (2, heads, length, keys),
    "of heads": lambda heads, length, keys: (1, heads, length, keys),
    "of keys": lambda heads, length, keys: (2, 1, 1, keys),
}
SCORE_MODS = {
    "alibi": lambda heads: alibi(_learned(heads)),
    "t5": lambda heads: relative_position_bias(_learned(8, heads), bidirectional=True, max_distance=20),
    "bends": lambda heads: ScoreMod(
        lambda score, row, head, query, key, held: torch.tanh(score * held[head]) + held[key % heads] * score,
        _learned(heads),
    ),
    "hides": lambda heads: ScoreMod(
        lambda score, row, head, query, key: torch.where((query + key) % 4 < 2 - row, score, -torch.inf)
    ),
}


def _learned(*shape):
    return torch.linspace(-0.7, 1.1, math.prod(shape), dtype=torch.float64).view(shape).requires_grad_(True)


@dataclass(frozen=True)
class Case:
    """What the law is tried on; `mask`: a description for tests/drawn_cases/masks.py; `rounded`: a dtype whose numbers the tensors have."""

    heads: int
    kv_heads: int
    length: int
    mask: dict[str, Any]
    dtype: torch.dtype = torch.float64
    seed: int = 0
    scale: float | None = None
    with_sinks: bool = False
    softcap: float | None = None
    dim_v: int | None = None
    bias: str | None = None
    score_mod: str | None = None
    dropout: float = 0.0
    keys: int | None = None
    rounded: torch.dtype | None = None

    def tensors(self):
        """Return q, k, v and the gradient of out, whole."""
        sizes = dict(dim_v=self.dim_v, keys=self.keys, seed=self.seed)
        held = inputs(self.heads, self.kv_heads, self.length, dtype=self.rounded or self.dtype, **sizes)
        return [t.to(self.dtype) for t in held]

    def options(self):
        """Return (what learns, the attention's options)."""
        sinks = torch.linspace(-1.0, 2.0, self.heads, dtype=torch.float64) if self.with_sinks else None
        sinks = None if sinks is None else sinks.to(self.rounded or self.dtype).to(self.dtype)
        bias = None
        if self.bias:
            shape = BIASES[self.bias](self.heads, self.length, self.keys or self.length)
            bias = torch.randn(shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
            bias = bias.to(self.rounded or self.dtype).to(self.dtype)
            if self.bias == "of keys":
                bias[..., ::5] = -torch.inf
        score_mod = SCORE_MODS[self.score_mod](self.heads) if self.score_mod else None
        dropout = AttentionDropout(self.dropout, 7, 3, torch.tensor([11, 4])) if self.dropout else None
        learned = [t.requires_grad_(True) for t in (sinks, bias) if t is not None]
        learned += score_mod.tensors if score_mod else ()
        return learned, dict(
            scale=self.scale, sinks=sinks, softcap=self.softcap, bias=bias, score_mod=score_mod, dropout=dropout
        )


def sharded(ulysses, ring, transport="network", method="hops", layout=None, stages=1, **options):
    """Return whole (out, dq, dk, dv, and of each thing that learns), gathered from the shards; padding cut off."""
    case = Case(**options)
    mesh = mesh_of(ulysses, ring)
    ways = {"layout": layout, "ulysses_stages": stages, **ring_options(transport, method)}
    layout, rank = layout or mesh.layout, mesh.sequence_rank
    keys = case.length if case.keys is None else case.keys
    padded, padded_keys = layout.padded_length(case.length), layout.padded_length(keys)
    q, k, v, grad = (
        shard(pad(t, size, dim=2, value=0.0), layout, rank, dim=2)
        for t, size in zip(case.tensors(), (padded, padded_keys, padded_keys, padded), strict=True)
    )
    for t in (q, k, v):
        t.requires_grad_(True)
    learned, attention = case.options()
    mask = masks.build(case.mask, case.length, padded, *((keys, padded_keys) if case.keys else ()))
    out = sequence_parallel_attention(q, k, v, mesh=mesh, mask=mask, **attention, **ways)
    out.backward(grad)
    results = []
    for tensor, length in ((out.detach(), case.length), (q.grad, case.length), (k.grad, keys), (v.grad, keys)):
        parts = [torch.empty_like(tensor.contiguous()) for _ in range(layout.size)]
        if layout.size > 1:
            dist.all_gather(parts, tensor.contiguous(), group=mesh.sequence_group)
        else:
            parts = [tensor]
        results.append(merge(parts, layout, dim=2).narrow(2, 0, length))
    for tensor in learned:
        gradient = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
        if layout.size > 1:
            dist.all_reduce(gradient, group=mesh.sequence_group)
        results.append(gradient)
    return results


def whole(**options):
    """Return the plain reference's (out, dq, dk, dv, and of each thing that learns)."""
    case = Case(**options)
    q, k, v, grad = case.tensors()
    for t in (q, k, v):
        t.requires_grad_(True)
    learned, attention = case.options()
    keys = (case.keys, case.keys) if case.keys else ()
    out = reference_attention(q, k, v, masks.build(case.mask, case.length, case.length, *keys), **attention)
    out.backward(grad)
    return [out.detach(), q.grad, k.grad, v.grad, *[t.grad for t in learned]]


def law_case(cases):
    """Run many cases in one call and return, per case, the four whole tensors of this rank."""
    return [sharded(**case) for case in cases]
