"""What the ranks of test_sharded_tensors run with weights that are assigned, and are the memory of what was assigned from then on."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_sp.parallelize import num_writes, used_as_whole


def assigned_memory(rows: int) -> tuple[list[list[float]], list[list[float]], list[int]]:
    """Assign averages to a layer's weights, and the layer's to another one's, and write to each; whole and sharded over two ranks.

    Returns:
        what the two layers give, on one device and on shards, and how often each weight was written to.
    """
    whole, sharded = (_written(rows, is_sharded) for is_sharded in (False, True))
    return whole[0], sharded[0], sharded[1]


def _written(rows: int, is_sharded: bool) -> tuple[list[list[float]], list[int]]:
    torch.manual_seed(1)
    pair = nn.Sequential(*(nn.Linear(3, rows, dtype=torch.float64) for _ in range(2)))
    if is_sharded:
        for each in pair:
            fully_shard(each, mesh=init_device_mesh("cpu", (2,)))
        fully_shard(pair, mesh=init_device_mesh("cpu", (2,)))
    begun = [num_writes(each) for each in pair.parameters()]
    given: list[list[float]] = []

    def give() -> None:
        with torch.no_grad():
            given.extend(each(torch.ones(1, 3, dtype=torch.float64)).flatten().tolist() for each in pair)
        for each in pair if is_sharded else ():
            each.reshard()  # type: ignore[operator]

    with used_as_whole(pair):
        give()
        first: list[Any] = [each.data for each in pair[0].parameters()]
        averages = [each.clone() * 2 for each in first]
        for weight, other, average in zip(pair[0].parameters(), pair[1].parameters(), averages, strict=True):
            weight.data = average
            average.add_(1)  # the weight's own memory
            other.data = weight.data
            weight.data.mul_(3)  # the other's, too
        give()
        for weight, before in zip(pair[0].parameters(), first, strict=True):
            weight.data = before
        for average in averages:
            average.zero_()  # the other's alone
        give()
        return given, [num_writes(each) - number for each, number in zip(pair.parameters(), begun, strict=True)]
