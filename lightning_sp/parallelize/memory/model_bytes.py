"""What a rank holds of a sharded model whatever a step's length, and what the shapes of its parameters tell of a step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_sp.mesh import gathered_shape
from lightning_sp.parallelize.fsdp.parameter_groups import fsdp_modules, parameter_groups
from lightning_sp.parallelize.memory.memory_budget import used_bytes
from lightning_sp.parallelize.memory.memory_prediction import ModelBytes, StepBytes, estimated_step
from lightning_sp.parallelize.tiles import MlpTiles

# What an optimizer keeps for each element of a parameter, by the name of its class; others are taken for Adam.
_STATES = {"SGD": 1, "Adagrad": 1, "Adafactor": 1, "Lion": 1}
# Bytes of each number of two states of torchao's: a code, and a scale for a block; of shards as large as it quantizes.
_QUANTIZED = {"8bit": 2 * (1 + 4 / 256), "4bit": 2 * (1 / 2 + 4 / 128), "Fp8": 2 * (1 + 4 / 256)}
_LEAST_QUANTIZED = 4096
# Bytes of an element in half precision; and with what norms, residuals and positions keep in float32, on the mean of a block: 2.8 of a Llama
# in bfloat16, 3.0 under autocast (tests/parallelize/memory).
_HALF, _HALF_AND_WHOLE = 2, 3.0
# FSDP has a block's parameters while its backward runs, those of the next one already, its gradients whole, and as they leave, those of the
# block behind it. When its own leave, its parameters are gone, and those of the other ranks arrive. That is four; a device is done with one
# later than the host. Outside of blocks nothing is fetched ahead.
_BLOCKS_AT_A_TIME, _OUTSIDE_AT_A_TIME = 5, 2


def model_bytes(
    module: nn.Module,
    blocks: Sequence[nn.Module],
    optimizers: Sequence[Optimizer],
    device: torch.device,
    *,
    steps_in_backward: bool = False,
    accumulates_whole: bool = False,
) -> ModelBytes:
    """Return what this rank holds of a model.

    Args:
        module: sharded.
        blocks: of it, each a unit of FSDP.
        optimizers: that step it.
        device: of this rank.
        steps_in_backward: whether a unit's gradients are freed before the next one's come; a device has two units', for it reduces beside.
        accumulates_whole: whether the gradients of whole weights stay between micro-batches.
    """
    state = 0
    for optimizer in optimizers:
        name = type(getattr(optimizer, "optimizer", optimizer)).__name__
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        state += sum(_state_bytes(name, each) for each in parameters if not optimizer.state.get(each))
    largest = max((sum(map(_whole_bytes, block.parameters())) for block in blocks), default=0)
    outside = sum(map(_whole_bytes, _outside(module, blocks)))
    units = 1 if device.type == "cpu" else 2
    there = sum(_local_bytes(each.grad) for each in module.parameters() if each.grad is not None)
    trained = [each for each in module.parameters() if each.requires_grad]
    gradients = units * largest_unit_bytes(module) if steps_in_backward else sum(map(_local_bytes, trained))
    if accumulates_whole:
        gradients += sum(map(_whole_bytes, trained))
    return ModelBytes(
        base=max(0, used_bytes(device) - there),
        gradients=gradients,
        optimizer=state,
        gathered=_BLOCKS_AT_A_TIME * largest + _OUTSIDE_AT_A_TIME * outside,
        steps_in_backward=steps_in_backward,
    )


def largest_unit_bytes(module: nn.Module) -> int:
    """Return the bytes of this rank's gradients of the largest unit of FSDP, which pads them."""
    units = parameter_groups(fsdp_modules(module))
    return max((sum(map(_gradient_bytes, unit.fsdp_params)) for unit in units), default=0)


def _gradient_bytes(parameter: Any) -> int:
    sharded = parameter.sharded_param
    return math.prod(parameter.padded_sharded_param_size) * sharded.element_size() if sharded.requires_grad else 0


def step_of_shapes(
    module: nn.Module,
    blocks: Sequence[nn.Module],
    precision: str,
    tiles: MlpTiles | None = None,
    *,
    logits: bool = True,
) -> StepBytes:
    """Return what one token leaves, by the shapes of parameters alone, and the Trainer's precision: under "bf16-mixed" products are halved.

    Args:
        module: sharded.
        blocks: of it.
        precision: of the Trainer.
        tiles: of the blocks' MLPs; None where none can run in tiles.
        logits: whether the loss has all logits at a time.
    """
    widths = [sum(sum(gathered_shape(each)[-2:]) for each in block.parameters() if each.dim() > 1) for block in blocks]
    element: float = max((each.element_size() for each in module.parameters() if each.is_floating_point()), default=4)
    if element == _HALF or "mixed" in precision:
        element = _HALF_AND_WHOLE
    mlps = [(0, 0)] * len(blocks) if tiles is None else tiles.widths()
    return estimated_step(widths, vocabulary_of(module, blocks) if logits else 0, element, mlps)


def vocabulary_of(module: nn.Module, blocks: Sequence[nn.Module]) -> int:
    """Return the words of a model's largest table outside of its blocks; 0 where it has none."""
    return max((each.shape[0] for each in _outside(module, blocks) if each.dim() == 2), default=0)


def _state_bytes(optimizer: str, parameter: Tensor) -> int:
    quantized = next((size for ending, size in _QUANTIZED.items() if optimizer.endswith(ending)), None)
    local = _local_bytes(parameter)
    if quantized is not None and (numbers := local // parameter.element_size()) >= _LEAST_QUANTIZED:
        return math.ceil(quantized * numbers)
    return _STATES.get(optimizer, 2) * local


def _outside(module: nn.Module, blocks: Iterable[nn.Module]) -> list[Tensor]:
    inside = {each for block in blocks for each in block.parameters()}
    return [each for each in module.parameters() if each not in inside]


def _whole_bytes(parameter: Tensor) -> int:
    return math.prod(gathered_shape(parameter)) * parameter.element_size()


def _local_bytes(parameter: Tensor) -> int:
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return local.numel() * local.element_size()
