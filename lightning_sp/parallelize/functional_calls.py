"""`torch.func.functional_call` of a sharded module: a teacher of averaged weights, an inner step, a model whose weights another one makes.

torch puts the given tensors in the place of a module's parameters for one call. FSDP2's hooks would then put the unit's own back, without a
word. So these hooks rest for such a call: what is given is whole, and what is not is gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import stateless

from lightning_sp.errors import SequenceParallelError
from lightning_sp.mesh import tensor_parallel_part
from lightning_sp.parallelize.activation_checkpointing import without_checkpoints
from lightning_sp.parallelize.fsdp.dtensor.outside_weights import WeightShard, whole_outputs_of
from lightning_sp.parallelize.tiles import without_tiles

# Of hooks that gather or free parameters, and of those that stand for them.
_HOOKS = ("torch.distributed.fsdp.", "lightning_sp.parallelize.fsdp.")


@contextmanager
def functional_calls_of_whole_weights() -> Iterator[None]:
    """Let functional calls of sharded modules use the weights that they are given, while this is entered."""
    original = stateless._functional_call
    stateless._functional_call = partial(_functional_call, original)
    try:
        yield
    finally:
        stateless._functional_call = original


def _functional_call(
    original: Callable[..., Any], module: nn.Module, given: Mapping[str, Tensor], *args: Any, **kwargs: Any
) -> Any:
    """Call a module with tensors in the place of its parameters, as torch does.

    Communicates: an all_gather of each parameter that is not given, and of each given one that is a shard; in the backward an all_reduce.
    """
    own = {name: each for name, each in module.named_parameters(remove_duplicate=False) if isinstance(each, DTensor)}
    if not own and not any(isinstance(each, (DTensor, WeightShard)) for each in given.values()):
        if torch.compiler.is_compiling():
            return original(module, given, *args, **kwargs)
        with without_tiles(module):
            return original(module, given, *args, **kwargs)
    if split := [name for name, each in own.items() if tensor_parallel_part(each)[1] is not None]:
        raise SequenceParallelError(
            f"torch.func.functional_call of a module with {len(split)} weights that tensor_parallel_size splits ({split[0]}): its layers "
            "compute on a part of each; leave them out of tensor_parallel_plan, or call a module without them"
        )
    # One gather for weights that modules share.
    shared: dict[int, Tensor] = {}
    tensors = {name: shared.setdefault(id(each), whole_outputs_of(each)) for name, each in {**own, **given}.items()}
    # What is computed again in the backward would read the module's own weights.
    with _without_hooks(module), without_checkpoints(module), without_tiles(module):
        return original(module, tensors, *args, **kwargs)


@contextmanager
def _without_hooks(root: nn.Module) -> Iterator[None]:
    """Have no hook of FSDP2's, and none that stands for one, in a module while this is entered."""
    before = [(each, each._forward_pre_hooks, each._forward_hooks) for each in root.modules()]
    for module, pre_hooks, hooks in before:
        module._forward_pre_hooks = type(pre_hooks)((key, f) for key, f in pre_hooks.items() if not _gathers(f))
        module._forward_hooks = type(hooks)((key, f) for key, f in hooks.items() if not _gathers(f))
    try:
        yield
    finally:
        for module, pre_hooks, hooks in before:
            module._forward_pre_hooks, module._forward_hooks = pre_hooks, hooks


def _gathers(hook: Any) -> bool:
    """Return whether a hook gathers or frees parameters, or stands for one that does."""
    owner = getattr(hook, "__self__", None)
    source = hook if owner is None else type(owner)
    return str(getattr(source, "__module__", "")).startswith(_HOOKS)
