"""What the ranks of test_sharded_tensors run with a weight of one row, of which the second rank has nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lightning_sp.parallelize import used_as_whole


def _lerped(own: list[torch.Tensor], others: list[torch.Tensor]) -> list[torch.Tensor]:
    torch._foreach_lerp_(own, others, 0.1)
    return own


def _copied(own: list[torch.Tensor], others: list[torch.Tensor]) -> list[torch.Tensor]:
    torch._foreach_copy_(own, others)
    return own


CASES: dict[str, Any] = {
    "copy_": lambda w, own: w.clone().copy_(own),
    "add_": lambda w, own: w.clone().add_(own, alpha=2),
    "lerp_": lambda w, own: w.clone().lerp_(own, 0.1),
    "copy_ of a result": lambda w, own: w.clone().copy_(torch.maximum(w, own)),
    "foreach": lambda w, own: _lerped([w.clone(), w.clone()], [own, own])[1],
    "foreach copy": lambda w, own: _copied([w.clone(), w.clone()], [own, own])[1],
    "plain.add_": lambda w, own: own.clone().add_(w, alpha=2),
    "plain.lerp_": lambda w, own: own.clone().lerp_(w, 0.1),
    "plain.copy_": lambda w, own: own.clone().copy_(w),
    "plain -=": lambda w, own: own.clone().__isub__(0.1 * (own - w)),
}


def of_one_row() -> dict[str, bool]:
    """Let a plain tensor meet the weight of a head for one number, and its bias; which results are one device's."""
    torch.manual_seed(1)
    linear = nn.Linear(3, 1, dtype=torch.float64)
    fully_shard(linear, mesh=init_device_mesh("cpu", (2,)))
    same = {}
    for weight in (linear.weight.detach(), linear.bias.detach()):
        whole: torch.Tensor = weight.full_tensor()  # type: ignore[operator]
        own = torch.linspace(1, 2, whole.numel(), dtype=torch.float64).view(whole.shape)
        with used_as_whole(linear):
            for name, run in CASES.items():
                found = run(weight, own)
                found = found.full_tensor() if isinstance(found, DTensor) else found
                same[f"{name} {tuple(whole.shape)}"] = torch.equal(found, run(whole, own))
    return same


def addresses() -> tuple[int, bool]:
    """Return how many addresses three linear layers' six weights have, of which two have one weight, and whether `data` has them, too."""
    layers = nn.Sequential(nn.Linear(3, 1), nn.Linear(3, 1), nn.Linear(3, 2))
    layers[1].weight = layers[0].weight
    fully_shard(layers, mesh=init_device_mesh("cpu", (2,)))
    weights = [each for layer in layers for each in layer.parameters()]
    with used_as_whole(layers):
        found = [each.data_ptr() for each in weights]
        return len(set(found)), found == [each.data.data_ptr() for each in weights]
