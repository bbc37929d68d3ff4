"""What each rank runs in test_tensor_digest.py."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from lightning_sp.checkpoint.contents.tensor_digest import tensor_digest, tensor_digests


def digests(shard_size: int) -> tuple[dict[str, str | None], dict[str, str]]:
    """Digests of tensors over the ranks, and of the whole ones: rows that do not divide, a row alone, a plain tensor."""
    mesh = init_device_mesh("cpu", (2 // shard_size, shard_size))
    whole = {str(rows): torch.randn(rows, 3, generator=torch.Generator().manual_seed(rows)) for rows in (4, 5, 1)}
    sharded = {name: distribute_tensor(each, mesh, [Replicate(), Shard(0)]) for name, each in whole.items()}
    plain = torch.arange(3.0)
    return (
        tensor_digests({**sharded, "plain": plain}, None),
        {name: tensor_digest(each) for name, each in {**whole, "plain": plain}.items()},
    )
