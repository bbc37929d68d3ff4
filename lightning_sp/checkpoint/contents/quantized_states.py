"""States of optimizers that keep a few bits of each number (torchao: AdamW8bit, AdamW4bit, AdamWFp8), as a checkpoint stores them.

    in memory    codes of 4 or 8 bits, and one scale for each block of numbers of this rank's shard
    stored       `exp_avg`: the numbers, in float32, as AdamW's          `exp_avg_scale`: of each number's block; 0 where it is no code

A block is some numbers one after the other, of a shard: other degrees cut others. Where those of a resume are those that were stored, all
codes are the same to the bit. Others are quantized anew. Scales are one for each block where blocks end with rows, else one for each number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import Optimizer

_SCALE = "_scale"
# Below as many numbers torchao keeps them as they are.
_LEAST = 4096


def block_size(optimizer: Optimizer) -> int | None:
    """Return of how many numbers a block of an optimizer's states is; None where it keeps whole numbers."""
    size = getattr(optimizer, "block_size", None)
    return size if isinstance(size, int) and callable(getattr(optimizer, "_new_buffer", None)) else None


def stored_states(optimizer: Optimizer, parameter: Tensor, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's states of a parameter as a checkpoint holds them: the same entries on all ranks."""
    size = block_size(optimizer)
    if size is None or parameter.numel() < _LEAST:
        return dict(values)
    stored: dict[str, Any] = {}
    for name, value in values.items():
        if not isinstance(value, Tensor) or value.shape != parameter.shape:
            stored[name] = value
            continue
        local = _local(value)
        scale = _scale_of_each(local)
        numbers = local.dequantize().float() if scale is not None else local
        stored[name] = _like(numbers, parameter)
        stored[name + _SCALE] = _shared(torch.zeros_like(numbers) if scale is None else scale, parameter, size)
    return stored


def restored_states(optimizer: Optimizer, parameter: Tensor, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states of a parameter as the optimizer keeps them; those that `stored_states` has not made as they are."""
    if block_size(optimizer) is None:
        return dict(values)
    restored = {name: value for name, value in values.items() if not name.endswith(_SCALE)}
    for name in list(restored):
        if name + _SCALE not in values:
            continue
        made = optimizer._new_buffer(parameter, name == "exp_avg")  # type: ignore[attr-defined]
        with torch.no_grad():
            _write(_local(made), _local(restored[name]), _local_scales(values[name + _SCALE], parameter))
        restored[name] = made
    return restored


def _local(value: Tensor) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def _scale_of_each(local: Any) -> Tensor | None:
    """Return the scale of each number's block; None of whole numbers."""
    if not hasattr(type(local), "__tensor_flatten__"):
        return None
    scale: Tensor = local.scale.float()
    return scale.repeat_interleave(local.numel() // scale.numel()).view(local.shape)


def _like(local: Tensor, parameter: Tensor, shape: torch.Size | None = None) -> Tensor:
    """Return a tensor of which this rank has a part, split as a parameter is."""
    if not isinstance(parameter, DTensor):
        return local
    size = parameter.shape if shape is None else shape
    stride = torch.empty(size, device="meta").stride()
    return DTensor.from_local(
        local, parameter.device_mesh, parameter.placements, run_check=False, shape=size, stride=stride
    )


def _shared(scale: Tensor, parameter: Tensor, size: int) -> Tensor:
    """Return the scales of all numbers, one of a block where none goes beyond a row of any rank."""
    if scale.dim() != 2 or scale.shape[1] % size:
        return _like(scale, parameter)
    shape = torch.Size((parameter.shape[0], parameter.shape[1] // size))
    return _like(scale[:, ::size].contiguous(), parameter, shape)


def _local_scales(scale: Tensor, parameter: Tensor) -> Tensor:
    """Return the scale of each number of this rank."""
    if scale.shape == parameter.shape:
        return scale.to_local() if isinstance(scale, DTensor) else _part(scale, parameter)
    times = parameter.shape[1] // scale.shape[1]
    if isinstance(scale, DTensor):
        scale = scale.full_tensor()
    if isinstance(parameter, DTensor) and all(
        not isinstance(each, Shard) or each.dim == 0 for each in parameter.placements
    ):
        return _part(scale, parameter).repeat_interleave(times, dim=1)
    return _part(scale.repeat_interleave(times, dim=1), parameter)


def _part(whole: Tensor, parameter: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return whole
    split: Any = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return split.to_local()  # type: ignore[no-any-return]


def _write(state: Any, numbers: Tensor, scales: Tensor) -> None:
    """Write numbers to a state: by the stored scales where a block has one of them, else quantized anew."""
    state.copy_(numbers)
    if not hasattr(type(state), "__tensor_flatten__"):
        return
    blocks = scales.reshape(state.scale.numel(), -1)
    kept = (blocks == blocks[:, :1]).all(dim=1) & (blocks[:, 0] != 0)
    exact = numbers.float().reshape(blocks.shape) / blocks
    if hasattr(state, "qmap"):
        codes = torch.bucketize(exact, (state.qmap[1:] + state.qmap[:-1]) / 2).to(torch.uint8)
        if codes.numel() != state.codes.numel():  # two codes in a byte
            codes = (codes[:, ::2] << 4) | codes[:, 1::2]
    else:
        codes = exact.to(state.codes.dtype)
    own = state.codes.view(-1).view(torch.uint8).view(len(blocks), -1)
    own[kept] = codes.view(torch.uint8)[kept]
    state.scale[kept] = blocks[kept, 0].to(state.scale.dtype)
