"""axolotl-ringmaster, as it is. Variants: ulysses, ring-p2p, distflash, zigzag (its packed branch: the one that runs on a CPU)."""

from __future__ import annotations

import types
from typing import Any

import ringmaster
import torch
from ringmaster.config import RingmasterConfig, RotateMethod
from ringmaster.ring.distflash import distflash_attention
from ringmaster.ring.zigzag import zigzag_ring_attention
from ringmaster.strategies.ring import make_ring_attention
from ringmaster.strategies.ulysses import make_ulysses_attention
from torch import Tensor

from benchmarks.peers.worker import contiguous, zigzag


def build(variant: str, problem: dict[str, Any], rank: int, world: int) -> Any:
    """Return (attend, shard)."""
    ulysses = world if variant == "ulysses" else 1
    config = RingmasterConfig(
        size=world, ulysses_size=ulysses, ring_size=world // ulysses, backend=ringmaster.Backend.AUTO,
        rotate_method=RotateMethod.ALLTOALL if "p2p" in variant else RotateMethod.ALLGATHER,
    )  # fmt: skip
    runtime = ringmaster.setup(config, num_kv_heads=problem["kv_heads"], device_type="cpu", inner_attn="sdpa")
    module = types.SimpleNamespace(
        num_key_value_groups=problem["heads"] // problem["kv_heads"], config=types.SimpleNamespace(_attn_implementation="x"),
        is_causal=True, training=True, sliding_window=None, layer_idx=0,
    )  # fmt: skip

    def heads_first(*tensors: Tensor) -> Any:
        return (t.transpose(1, 2) for t in tensors)

    def along_the_ring(*qkv: Tensor) -> Any:
        return ring_attention(module, *heads_first(*qkv), None, scaling=None, is_causal=True)[0]

    def ulysses_alone(*qkv: Tensor) -> Any:
        return ulysses_attention(module, *heads_first(*qkv), None, scaling=None, is_causal=True)[0]

    def zigzag_ring(*qkv: Tensor) -> Any:
        edges = torch.tensor([0, problem["length"]], dtype=torch.int32)
        return zigzag_ring_attention(*heads_first(*qkv), group=runtime.ring_group, scaling=None, cu_seqlens=edges)

    def distflash(*qkv: Tensor) -> Any:
        return distflash_attention(*heads_first(*qkv), group=runtime.ring_group, scaling=None)

    ulysses_attention = make_ulysses_attention("sdpa")
    ring_attention = make_ring_attention("math", "math", config.rotate_method)
    attend = {"ulysses": ulysses_alone, "ring-p2p": along_the_ring, "zigzag": zigzag_ring, "distflash": distflash}[
        variant
    ]
    return attend, (zigzag if variant == "zigzag" else contiguous)(rank, world)
