"""What a rank holds of a sharded model whatever a step's length, and what the shapes of its parameters tell of a step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_sp.mesh import gathered_shape
from lightning_sp.parallelize.memory_budget import used_bytes
from lightning_sp.parallelize.memory_prediction import ModelBytes, StepBytes, estimated_step

# What an optimizer keeps for each element of a parameter, by the name of its class; others are taken for Adam.
_STATES = {"SGD": 1, "Adagrad": 1, "Adafactor": 1, "Lion": 1}
# FSDP has a block's parameters while its backward runs, those of the next one already, its gradients whole, and as they leave, those of the
# block behind it. When its own leave, its parameters are gone, and those of the other ranks arrive. That is four; a device is done with one
# later than the host. Outside of blocks nothing is fetched ahead.
_BLOCKS_AT_A_TIME, _OUTSIDE_AT_A_TIME = 5, 2


def model_bytes(
    module: nn.Module, blocks: Sequence[nn.Module], optimizers: Sequence[Optimizer], device: torch.device
) -> ModelBytes:
    """Return what this rank holds of a model.

    Args:
        module: sharded.
        blocks: of it, each a unit of FSDP.
        optimizers: that step it.
        device: of this rank.
    """
    state = 0
    for optimizer in optimizers:
        per_element = _STATES.get(type(getattr(optimizer, "optimizer", optimizer)).__name__, 2)
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        state += per_element * sum(_local_bytes(each) for each in parameters if not optimizer.state.get(each))
    largest = max((sum(map(_whole_bytes, block.parameters())) for block in blocks), default=0)
    outside = sum(map(_whole_bytes, _outside(module, blocks)))
    there = sum(_local_bytes(each.grad) for each in module.parameters() if each.grad is not None)
    return ModelBytes(
        base=max(0, used_bytes(device) - there),
        gradients=sum(_local_bytes(each) for each in module.parameters() if each.requires_grad),
        optimizer=state,
        gathered=_BLOCKS_AT_A_TIME * largest + _OUTSIDE_AT_A_TIME * outside,
    )


def step_of_shapes(module: nn.Module, blocks: Sequence[nn.Module]) -> StepBytes:
    """Return what one token leaves, by the shapes of parameters alone."""
    widths = [sum(sum(gathered_shape(each)[-2:]) for each in block.parameters() if each.dim() > 1) for block in blocks]
    tables = [each.shape[0] for each in _outside(module, blocks) if each.dim() == 2]
    element = max((each.element_size() for each in module.parameters() if each.is_floating_point()), default=4)
    return estimated_step(widths, max(tables, default=0), element)


def _outside(module: nn.Module, blocks: Iterable[nn.Module]) -> list[Tensor]:
    inside = {each for block in blocks for each in block.parameters()}
    return [each for each in module.parameters() if each not in inside]


def _whole_bytes(parameter: Tensor) -> int:
    return math.prod(gathered_shape(parameter)) * parameter.element_size()


def _local_bytes(parameter: Tensor) -> int:
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return local.numel() * local.element_size()
