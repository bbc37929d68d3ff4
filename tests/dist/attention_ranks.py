"""What each rank runs in test_attention_law.py: importable by name in the spawned processes."""

from __future__ import annotations

import torch
import torch.distributed as dist

from lightning_sp.attention import sequence_parallel_attention
from lightning_sp.attention.reference import reference_attention
from lightning_sp.layout import merge, pad, shard
from lightning_sp.mesh import SequenceMesh, build_device_mesh
from tests import masks

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


def inputs(heads, kv_heads, length, batch=2, dim=8, dtype=torch.float64, seed=0, dim_v=None):
    g = torch.Generator().manual_seed(seed)
    dim_v = dim if dim_v is None else dim_v
    shapes = [
        (batch, heads, length, dim),
        (batch, kv_heads, length, dim),
        (batch, kv_heads, length, dim_v),
        (batch, heads, length, dim_v),
    ]
    return [torch.randn(shape, generator=g, dtype=torch.float64).to(dtype) for shape in shapes]


def options_of(heads, dtype, scale, with_sinks, softcap):
    sinks = torch.linspace(-1.0, 2.0, heads, dtype=torch.float64).to(dtype).requires_grad_(True) if with_sinks else None
    return sinks, dict(scale=scale, sinks=sinks, softcap=softcap)


def sharded(
    ulysses, ring, heads, kv_heads, length, mask, dtype=torch.float64, seed=0, scale=None, with_sinks=False, softcap=None, dim_v=None, layout=None
):  # fmt: skip
    """Return whole (out, dq, dk, dv[, dsinks]), gathered from the shards; padding cut off. `mask`: a description for tests/masks.py."""
    mesh = mesh_of(ulysses, ring)
    options = {"layout": layout}
    layout, rank = layout or mesh.layout, mesh.sequence_rank
    padded = layout.padded_length(length)
    q, k, v, grad = (
        shard(pad(t, padded, dim=2, value=0.0), layout, rank, dim=2)
        for t in inputs(heads, kv_heads, length, dtype=dtype, seed=seed, dim_v=dim_v)
    )
    for t in (q, k, v):
        t.requires_grad_(True)
    sinks, scores = options_of(heads, dtype, scale, with_sinks, softcap)
    out = sequence_parallel_attention(q, k, v, mesh=mesh, mask=masks.build(mask, length, padded), **scores, **options)
    out.backward(grad)
    results = []
    for tensor in (out.detach(), q.grad, k.grad, v.grad):
        parts = [torch.empty_like(tensor.contiguous()) for _ in range(layout.size)]
        if layout.size > 1:
            dist.all_gather(parts, tensor.contiguous(), group=mesh.sequence_group)
        else:
            parts = [tensor]
        results.append(merge(parts, layout, dim=2).narrow(2, 0, length))
    if sinks is None:
        return results
    if layout.size > 1:
        dist.all_reduce(sinks.grad, group=mesh.sequence_group)
    return [*results, sinks.grad]


def whole(heads, kv_heads, length, mask, dtype=torch.float64, seed=0, scale=None, with_sinks=False, softcap=None, dim_v=None):
    """Return the plain reference's (out, dq, dk, dv[, dsinks])."""
    q, k, v, grad = inputs(heads, kv_heads, length, dtype=dtype, seed=seed, dim_v=dim_v)
    for t in (q, k, v):
        t.requires_grad_(True)
    sinks, options = options_of(heads, dtype, scale, with_sinks, softcap)
    out = reference_attention(q, k, v, masks.build(mask, length, length), **options)
    out.backward(grad)
    return [out.detach(), q.grad, k.grad, v.grad, *([] if sinks is None else [sinks.grad])]


def law_case(cases):
    """Run many cases in one call and return, per case, the four whole tensors of this rank."""
    return [sharded(**case) for case in cases]
