"""`save_pretrained`, `torch.save` and `copy.deepcopy` of a model whose parameters are sharded: refused with the lines that do it.

A shard by itself, of a `state_dict`, may be saved on every rank, and rank 0's file alone has a part of the weights: that is said.

Hugging Face and PEFT read storages that a shard does not have, and FSDP2's classes cannot be pickled. To gather here would need all ranks, and
users save on rank 0.
"""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NoReturn

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_sp.errors import SequenceParallelError

_PROMPTS = "prompt_encoder."
_REPLACED = ("_parameters", "_forward_pre_hooks", "_forward_hooks")


def refuse_live_saves(root: nn.Module) -> None:
    """Make every module of Hugging Face and PEFT ask for a whole state, as `save_pretrained(folder, state_dict=...)` takes it.

    Modules that FSDP2 shards say how they are saved and copied, in place of an error of pickle's.
    """
    DTensor.__reduce_ex__ = _pickle_shard  # type: ignore[method-assign,assignment]
    for module in root.modules():
        if isinstance(module, FSDPModule):
            # FSDP2 makes a class for each of the user's, which only sharded modules have.
            kind: Any = type(module)
            kind.__deepcopy__, kind.__reduce_ex__ = _refuse_deepcopy, _refuse_pickle
            kind.__copy__ = _copy
        save = getattr(module, "save_pretrained", None)
        if callable(save) and "save_pretrained" not in vars(module):
            module.save_pretrained = partial(_save, save, module)  # type: ignore[assignment]


def _pickle_shard(tensor: DTensor, protocol: Any) -> Any:
    """Pickle as torch does, and say that it is a part."""
    own = tensor.to_local() if not all(each.is_replicate() for each in tensor.placements) else None
    if own is not None and own.numel() < tensor.numel():
        _warn_of_shard()
    return Tensor.__reduce_ex__(tensor, protocol)  # type: ignore[no-untyped-call]


@cache
def _warn_of_shard() -> None:
    rank = f"rank {dist.get_rank()} of {dist.get_world_size()}" if dist.is_initialized() else "this process"
    warnings.warn(
        f"sequence_parallel: torch.save, or pickle, of sharded tensors, of a state_dict() say: what {rank} saves is its part of them alone, and "
        "the weights are lost without the files of all ranks; gather on all ranks, then save on one: state = "
        "trainer.strategy.whole_state_dict(module); if trainer.is_global_zero: torch.save(state, path)",
        stacklevel=4,
    )


def _refuse_pickle(module: nn.Module, protocol: object = None) -> NoReturn:
    raise SequenceParallelError(
        f"torch.save, or pickle, of {type(module).__name__}: every rank holds a shard of each parameter; gather on all "
        "ranks, then save on one: state = trainer.strategy.whole_state_dict(module); if trainer.is_global_zero: torch.save(state, path); or "
        "trainer.save_checkpoint(path) on all ranks, and lightning_sp.export_checkpoint"
    )


def _refuse_deepcopy(module: nn.Module, memo: object = None) -> NoReturn:
    raise SequenceParallelError(
        f"copy.deepcopy of {type(module).__name__}, whose parameters are sharded: the copy would have no unit of FSDP2; "
        "copy it in __init__ or configure_model, before it is sharded, or copy its weights: trainer.strategy.whole_state_dict(module)"
    )


def _copy(module: nn.Module) -> nn.Module:
    """Stand for `copy.copy`, which would ask for what pickle asks."""
    copied: nn.Module = copy._reconstruct(module, None, *object.__reduce_ex__(module, 4))  # type: ignore[attr-defined]
    return copied


def _save(save: Callable[..., Any], module: nn.Module, *args: Any, state_dict: Any = None, **kwargs: Any) -> Any:
    if state_dict is None:
        raise SequenceParallelError(
            f"{type(module).__name__}.save_pretrained: every rank holds a shard of each parameter; gather on "
            "all ranks, then save on one: state = trainer.strategy.whole_state_dict(model); "
            "if trainer.is_global_zero: model.save_pretrained(folder, state_dict=state)"
        )
    with _whole_prompts(module, state_dict):
        return save(*args, state_dict=state_dict, **kwargs)


@contextmanager
def _whole_prompts(module: nn.Module, state: Mapping[str, Tensor]) -> Iterator[None]:
    """Give PEFT's prompt encoders the values of a state while this is entered: it saves what they compute, whatever the state says.

    One rank computes it: without the hooks in which FSDP2 would gather.
    """
    encoders = {name: each for name, each in module.named_modules() if name.startswith(_PROMPTS)}
    before = [(each, {name: vars(each)[name] for name in _REPLACED}) for each in encoders.values()]
    for name, each in encoders.items():
        own = {key: f"{name}.{key}" for key in each._parameters}
        parameters = {k: nn.Parameter(state[n]) if n in state else each._parameters[k] for k, n in own.items()}
        hooks: dict[str, Any] = {name: OrderedDict() for name in _REPLACED[1:]}
        vars(each).update({"_parameters": parameters, **hooks})
    try:
        yield
    finally:
        for each, values in before:
            vars(each).update(values)
