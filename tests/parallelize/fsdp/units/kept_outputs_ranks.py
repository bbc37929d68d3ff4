"""What the ranks of test_kept_outputs run."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_sp.config import MemoryOptions
from lightning_sp.parallelize import make_fsdp_root, shard_model
from lightning_sp.testing import max_error
from tests.parallelize.fsdp.gloo_collectives_ranks import mesh_of


class Cache:
    """Keys of each layer, as transformers' caches hold them."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.key, self.out = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, *, cache: Cache) -> Tensor:
        key = self.key(x)
        cache.keys.append(key)
        return x + self.out(key.tanh())


class Prefix(nn.Module):
    """Two layers, of which a step reads the keys alone: the last one's output has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, x: Tensor) -> Tensor:
        cache = Cache()
        for layer in self.layers:
            x = layer(x, cache=cache)
        return torch.stack([key.square().sum() for key in cache.keys]).sum()


def build() -> Prefix:
    torch.manual_seed(0)
    return Prefix().double()


def error() -> float:
    """Return the largest error of a gradient."""
    inputs = torch.randn(dist.get_world_size(), 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    plain, root = build(), build()
    (plain(inputs) / len(inputs)).backward()
    layers: Any = list(root.layers)
    shard_model(root, layers, mesh_of((dist.get_world_size(),)), MemoryOptions())
    make_fsdp_root(root)
    root(inputs[dist.get_rank()]).backward()
    expected = dict(plain.named_parameters())
    found = {name: each.grad for name, each in root.named_parameters() if each.grad is not None}
    return max(max_error(each.full_tensor(), expected[name].grad) for name, each in found.items()) + (
        0.0 if found.keys() == {n for n, each in expected.items() if each.grad is not None} else 1.0
    )
