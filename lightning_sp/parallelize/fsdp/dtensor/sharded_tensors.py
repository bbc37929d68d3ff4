"""Sharded parameters used as on one device, where torch's DTensor would do something else without a word.

float(weight.norm()), gradient.abs().max().item()      DTensor: this rank's term of an unfinished sum      here: the whole's
weight.data = average                                  DTensor: nothing                                   here: as of any tensor
weight[0].zero_(), gradient[:10] = 0                   DTensor: nothing, or an error                      here: as of any tensor
gradient.numpy()                                       DTensor: an error                                  here: the whole's, to be read

So they are from a model's first run on, and behind its runs: a script prints the norm of a weight that it has trained. torch's own DTensor is
back where the ranks' process groups are destroyed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_sp import comm
from lightning_sp.errors import SequenceParallelError
from lightning_sp.parallelize.fsdp.dtensor.behind_runs import together
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

# What FSDP2 has of each sharded parameter, by the parameter's id.
_SHARDS: WeakValueDictionary[int, Any] = WeakValueDictionary()
# How many worlds live in which a model was sharded: one that is destroyed late leaves a later one alone.
_WORLDS: list[None] = []
_READ = torch.ops.aten._local_scalar_dense.default
# The attribute of a shard with the writes that its tensor in memory does not count.
_WRITES = "_num_writes_elsewhere"
# Methods that may give one number of a whole tensor: a plain tensor at once, for what takes no DTensor (`torch.tensor([...])`), and for a log
# that is read after the run.
_NUMBERS = ("norm", "sum", "mean", "max", "min", "amax", "amin", "std", "var", "all", "any", "count_nonzero", "dot")


@contextmanager
def used_as_whole(root: nn.Module) -> Iterator[None]:
    """Let a DTensor's `item`, `float`, `int` and `bool` be the whole's, and let `parameter.data = ...` and writes to parts reach the shards.

    All of this stays behind the run; what an optimizer's step makes of plain gradients does not.

    Args:
        root: the sharded module.

    Communicates: each number whose sum is not finished, one all_reduce of it: all ranks must read it.
    """
    _SHARDS.update(
        {id(each.sharded_param): each for group in parameter_groups(fsdp_modules(root)) for each in group.fsdp_params}
    )
    if comm.world() is not None:
        _use()
    before_step = register_optimizer_step_pre_hook(shard_plain_gradients)
    try:
        yield
    finally:
        before_step.remove()


@comm.cached_per_world
def _use() -> None:
    """Let DTensor do what is asked for here as long as the world lives."""
    _WORLDS.append(None)
    world = comm.world()
    assert world is not None
    comm.when_destroyed(world, _use_no_more)
    handlers = DTensor._op_dispatcher._custom_op_handlers
    handlers[_READ] = _read
    handlers.update({**dict.fromkeys(PART_OPS, _part), **dict.fromkeys(RANDOM_OPS, random)})
    DTensor.data = property(detach, _assign)  # type: ignore[assignment]
    for name, method in _methods():
        setattr(DTensor, name, method)


def _use_no_more() -> None:
    """Let DTensor do what torch's own does."""
    _WORLDS.pop()
    if _WORLDS:
        return
    for op in (_READ, *PART_OPS, *RANDOM_OPS):
        DTensor._op_dispatcher._custom_op_handlers.pop(op, None)
    del DTensor.data
    for name, _ in _methods():
        delattr(DTensor, name)


def _methods() -> Iterator[tuple[str, Any]]:
    """Yield what a DTensor's methods are during a run; torch's class has none of its own by these names."""
    yield from writing_methods()
    yield "__torch_function__", classmethod(beside_sharded)
    yield "numpy", _numpy
    yield "tolist", _tolist
    yield "data_ptr", _data_ptr
    yield "__format__", _formatted
    for name in _NUMBERS:
        yield name, _whole_number(getattr(torch.Tensor, name))


def _numpy(self: Any, *, force: bool = False) -> Any:
    """As of a plain tensor, to be read: what is written to it would not reach the shards. Every rank must call it."""
    found = together(self.full_tensor).numpy(force=force)
    found.flags.writeable = False
    return found


def _tolist(self: Any) -> Any:
    """As of a plain tensor, one that needs a gradient too. Every rank must call it."""
    return together(self.full_tensor).tolist()


def _data_ptr(self: Any) -> int:
    """As of a plain tensor, to tell weights apart (`{p.data_ptr(): p}`): torch's is 0 of each. Of an empty part it is its storage's.

    torch itself has its own: by 0 `torch.save` knows that the memory is another tensor's.
    """
    if sys._getframe(1).f_globals.get("__name__", "").partition(".")[0] == "torch":
        return torch.Tensor.data_ptr(self)
    local = self._local_tensor
    return int(local.data_ptr() or local.untyped_storage()._cdata)


def _formatted(self: Any, spec: str) -> str:
    """As of a plain tensor: a number by its value, `f"{weight.norm():.3f}"`, where every rank must call it; without a format torch's words."""
    return format(self.item() if spec and not self.dim() else str(self), spec)


def _whole_number(original: Any) -> Any:
    @wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(self, *args, **kwargs)
        # One with a gradient stays: a penalty on sharded weights is refused where it meets the loss.
        whole = isinstance(found, DTensor) and found.dim() == 0 and not found.requires_grad
        return together(found.full_tensor) if whole else found

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
    is_whole = all(each.is_replicate() for each in tensor.placements)
    return (tensor.to_local() if is_whole else together(tensor.full_tensor)).item()


def num_writes(tensor: torch.Tensor) -> int:
    """Return how often a tensor, or this rank's part of it, was written to: through it, or through what `data` and `detach` give."""
    if not isinstance(tensor, DTensor):
        return tensor._version
    return tensor._version + tensor._local_tensor._version + int(getattr(tensor, _WRITES, 0))


def _assign(tensor: DTensor, value: torch.Tensor) -> None:
    """As `parameter.data = value` of a tensor on one device; of what every rank has whole, a slice of `parameters_to_vector` say, its part."""
    if (
        isinstance(value, DTensor)
        and value.shape == tensor.shape
        and value.device_mesh == tensor.device_mesh
        and all(each.is_replicate() for each in value.placements)
    ):
        value = value.redistribute(placements=tensor.placements).detach().clone()  # sends nothing
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
    shard = _SHARDS.get(id(tensor))
    if shard is not None and shard.sharded_param is not tensor:
        shard = None
    if shard is not None:
        _make_room(value._local_tensor, shard)
    tensor._local_tensor = value._local_tensor.detach().contiguous()
    if shard is not None:
        shard.reset_sharded_param()
    # An assignment is one write, whatever was written to what is assigned.
    setattr(tensor, _WRITES, 0)
    setattr(tensor, _WRITES, before + 1 - num_writes(tensor))


def _make_room(assigned: torch.Tensor, shard: Any) -> None:
    """Let what is assigned be the parameter's own memory on a rank whose part is a smaller one, too, as it is on one device.

    FSDP2 gathers parts of one size, and would copy a smaller one: what is written to `average` behind `parameter.data = average` would reach the
    parameter on the other ranks alone.
    """
    size = shard.padded_sharded_param_size
    if assigned.shape == size or not assigned.is_contiguous() or shard.pin_memory:
        return
    end = assigned.storage_offset() + size.numel()
    if assigned.untyped_storage().nbytes() < end * assigned.itemsize:
        padded = assigned.new_zeros(size)
        padded[: len(assigned)] = assigned
        assigned.data = padded[: len(assigned)]  # is no write, as `set_` would be
    strides = torch.empty(size, device="meta").stride()
    shard._sharded_param_data = assigned.detach().as_strided(size, strides).view(-1)
