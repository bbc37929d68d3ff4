"""Sharded parameters used as on one device, where torch's DTensor would do something else without a word.

float(weight.norm()), gradient.abs().max().item()      DTensor: this rank's term of an unfinished sum      here: the whole's
weight.data = average                                  DTensor: nothing                                   here: as of any tensor
weight[0].zero_(), gradient[:10] = 0                   DTensor: nothing, or an error                      here: as of any tensor
gradient.numpy()                                       DTensor: an error                                  here: the whole's, to be read
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_sp.errors import SequenceParallelError
from lightning_sp.parallelize.fsdp.dtensor.plain_operands import beside_sharded, shard_plain_gradients
from lightning_sp.parallelize.fsdp.dtensor.sharded_parts import (
    PART_OPS,
    RANDOM_OPS,
    detach,
    part,
    random,
    writing_methods,
)
from lightning_sp.parallelize.fsdp.parameter_groups import fsdp_modules, parameter_groups

# Of the runs in progress, the latest last: an earlier one that failed may be torn down after a later one has begun.
_RUNS: list[property] = []
_READ = torch.ops.aten._local_scalar_dense.default
# The attribute of a shard with the writes that its tensor in memory does not count.
_WRITES = "_num_writes_elsewhere"
# Methods that may give one number of a whole tensor: a plain tensor at once, for what takes no DTensor (`torch.tensor([...])`), and for a log
# that is read after the run.
_NUMBERS = ("norm", "sum", "mean", "max", "min", "amax", "amin", "std", "var", "all", "any", "count_nonzero", "dot")


@contextmanager
def used_as_whole(root: nn.Module) -> Iterator[None]:
    """Let a DTensor's `item`, `float`, `int` and `bool` be the whole's, and let `parameter.data = ...` and writes to parts reach the shards.

    Args:
        root: the sharded module.

    Communicates: each number whose sum is not finished, one all_reduce of it: all ranks must read it.
    """
    own = _data_of(root)
    _RUNS.append(own)
    _use_latest()
    before_step = register_optimizer_step_pre_hook(shard_plain_gradients)
    try:
        yield
    finally:
        before_step.remove()
        _RUNS.remove(own)
        _use_latest()


def _use_latest() -> None:
    """Let DTensor do what the latest run asks for, and torch's own where there is none; runs need not end in order."""
    handlers = DTensor._op_dispatcher._custom_op_handlers
    if _RUNS:
        handlers[_READ] = _read
        handlers.update({**dict.fromkeys(PART_OPS, _part), **dict.fromkeys(RANDOM_OPS, random)})
        DTensor.data = _RUNS[-1]  # type: ignore[assignment]
        for name, method in _methods():
            setattr(DTensor, name, method)
    else:
        for op in (_READ, *PART_OPS, *RANDOM_OPS):
            handlers.pop(op, None)
        del DTensor.data
        for name, _ in _methods():
            delattr(DTensor, name)


def _methods() -> Iterator[tuple[str, Any]]:
    """Yield what a DTensor's methods are during a run; torch's class has none of its own by these names."""
    yield from writing_methods()
    yield "__torch_function__", classmethod(beside_sharded)
    yield "numpy", _numpy
    for name in _NUMBERS:
        yield name, _whole_number(getattr(torch.Tensor, name))


def _numpy(self: Any, *, force: bool = False) -> Any:
    """As of a plain tensor, to be read: what is written to it would not reach the shards. Every rank must call it."""
    found = self.full_tensor().numpy(force=force)
    found.flags.writeable = False
    return found


def _whole_number(original: Any) -> Any:
    @wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(self, *args, **kwargs)
        # One with a gradient stays: a penalty on sharded weights is refused where it meets the loss.
        whole = isinstance(found, DTensor) and found.dim() == 0 and not found.requires_grad
        return found.full_tensor() if whole else found

    return method


def _part(op_call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    handlers = DTensor._op_dispatcher._custom_op_handlers

    def run(*args: Any, **kwargs: Any) -> Any:
        del handlers[op_call]
        try:
            return op_call(*args, **kwargs)
        finally:
            handlers[op_call] = _part

    return part(op_call, args, kwargs, run)


def _read(op_call: object, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
    tensor = args[0]
    assert isinstance(tensor, DTensor)
    whole = tensor.to_local() if all(each.is_replicate() for each in tensor.placements) else tensor.full_tensor()
    return whole.item()


def num_writes(tensor: torch.Tensor) -> int:
    """Return how often a tensor, or this rank's part of it, was written to: through it, or through what `data` and `detach` give."""
    if not isinstance(tensor, DTensor):
        return tensor._version
    return tensor._version + tensor._local_tensor._version + int(getattr(tensor, _WRITES, 0))


def _data_of(root: nn.Module) -> property:
    shards = {
        id(each.sharded_param): each for group in parameter_groups(fsdp_modules(root)) for each in group.fsdp_params
    }

    def assign(tensor: DTensor, value: torch.Tensor) -> None:
        if (
            not isinstance(value, DTensor)
            or value._spec.placements != tensor._spec.placements
            or value.shape != tensor.shape
        ):
            raise SequenceParallelError(
                f"parameter.data = {type(value).__name__} of shape {tuple(value.shape)}, where the parameter is a shard of "
                f"{tuple(tensor.shape)}: assign what was computed from parameters of that shape, or write to it in place (copy_, mul_, lerp_)"
            )
        before = num_writes(tensor)
        tensor._local_tensor = value._local_tensor.detach().contiguous()
        if (shard := shards.get(id(tensor))) is not None:
            shard.reset_sharded_param()
        # An assignment is one write, whatever was written to what is assigned: FSDP2 copies it where the rank's part is a smaller one.
        setattr(tensor, _WRITES, 0)
        setattr(tensor, _WRITES, before + 1 - num_writes(tensor))

    return property(detach, assign)
