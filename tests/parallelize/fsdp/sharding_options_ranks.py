"""What the ranks of test_sharding_options run."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_sp.config import MemoryOptions
from lightning_sp.parallelize import accumulating, make_fsdp_root, shard_model, transformer_blocks
from lightning_sp.testing import max_error
from tests.parallelize.fsdp.gloo_collectives_ranks import mesh_of
from tests.parallelize.fsdp.units.vocabulary_units_ranks import MODELS, Stepped, counted_units, tokens, trained


def build(kind: str, dtype: torch.dtype, shape: tuple[int, ...] | None = None, **options: Any) -> Stepped:
    """Return a model; sharded over a mesh of that shape, where one is given."""
    torch.manual_seed(0)
    root = Stepped(MODELS[kind]().to(dtype))
    if shape is not None:
        shard_model(root, transformer_blocks(root), mesh_of(shape), MemoryOptions(**options))
        make_fsdp_root(root)
    return root


def law(kind: str, shape: tuple[int, ...], options: dict[str, Any]) -> tuple[float, Counter[str], int]:
    """Return the largest error of a gradient in three steps, a step's collectives, and how many units are whole after a forward."""
    world, rank = dist.get_world_size(), dist.get_rank()
    reference = trained(build(kind, torch.float64), list(range(world)))
    root = build(kind, torch.float64, shape, **options)
    calls: Counter[str] = Counter()
    with counted_units(root, calls):
        gradients = trained(root, [rank])
    worst = max(max_error(g[name], e[name]) for g, e in zip(gradients, reference, strict=True) for name in e)
    loss = root.training_step(tokens(rank, 0))
    whole = sum(not isinstance(each.weight, DTensor) for each in root.modules() if isinstance(each, nn.Linear))
    loss.backward()
    return worst, Counter({name: number // 3 for name, number in calls.items()}), whole


def summed(dtype: torch.dtype, gradient_dtype: str, micro_batches: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the gradients of several micro-batches, and what the option says they are, from every rank's own."""
    world, rank = dist.get_world_size(), dist.get_rank()
    root = build("separate", dtype, (world,), gradient_dtype=gradient_dtype)
    with accumulating(root, whole=True):
        for step in range(micro_batches - 1):
            root.training_step(tokens(rank, step)).backward()
    root.training_step(tokens(rank, micro_batches - 1)).backward()
    actual = {n: p.grad.full_tensor() for n, p in root.named_parameters()}
    wide = getattr(torch, gradient_dtype)
    total: dict[str, Tensor] = {}
    for each in range(world):
        own: dict[str, Tensor] = {}
        for step in range(micro_batches):
            plain = build("separate", dtype)
            plain.training_step(tokens(each, step)).backward()
            for name, parameter in plain.named_parameters():
                if name in own:
                    own[name] += parameter.grad
                else:
                    own[name] = parameter.grad.to(wide)
        for name, gradient in own.items():
            total[name] = total.get(name, 0) + gradient.float()
    return actual, {name: (gradient / world).to(wide).to(dtype) for name, gradient in total.items()}
