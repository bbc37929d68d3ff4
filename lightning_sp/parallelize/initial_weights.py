"""Initial weights: rank 0's, on every rank, bit for bit, for any degrees; other ranks may come with meta tensors.

Rank 0 builds the model as a single process would, with the same draws of the same generator. The others build it on the meta device where
they can (`configure_model`) and receive only their shards, tensor by tensor: no rank but 0 ever holds the whole.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torchmetrics import Metric

from lightning_sp import comm
from lightning_sp.errors import SequenceParallelError


def materialize_meta(module: nn.Module, device: torch.device) -> None:
    """Give a single process's meta parameters memory and their modules' own initialisation, in construction order.

    Raises:
        SequenceParallelError: a module holds meta parameters and has no `reset_parameters`.
    """
    for name, each in module.named_modules():
        own = [*each.parameters(recurse=False), *each.buffers(recurse=False)]
        if not any(t.is_meta for t in own):
            continue
        reset = getattr(each, "reset_parameters", None)
        if reset is None:
            raise SequenceParallelError(
                f"{name or 'the model'} ({type(each).__name__}) was built on the meta device and has no reset_parameters() to initialise it; "
                "define one, or build the model in configure_model without torch.device('meta'): the strategy defers it by itself"
            )
        each.to_empty(device=device, recurse=False)
        reset()


def whole_state(module: nn.Module) -> dict[str, Tensor]:
    """Return references to the memory of all whole parameters and buffers, by name: taken before sharding, broadcast after it.

    Not to the parameters themselves: those FSDP2 moves to its device in place, whole, and a reference would keep them there.
    """
    return {name: tensor.detach() for name, tensor in (*module.named_parameters(), *module.named_buffers())}


def tied_parameters(module: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Return the places of each parameter that has several: moving off the meta device would untie them."""
    places: dict[Tensor, list[tuple[nn.Module, str]]] = {}
    for each in module.modules():
        for name, parameter in each.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(parameter, []).append((each, name))
    return [where for where in places.values() if len(where) > 1]


def receive_weights(
    module: nn.Module, source: dict[str, Tensor], ties: list[list[tuple[nn.Module, str]]], device: torch.device
) -> None:
    """Fill the sharded module of every rank with rank 0's parameters and buffers.

    Args:
        module: the sharded module; its parameters may be on the meta device on ranks other than 0.
        source: rank 0's `whole_state` from before sharding; ignored elsewhere.
        ties: `tied_parameters` from after sharding.
        device: where buffers and shards live.

    Communicates: a broadcast of each parameter and buffer from rank 0.
    """
    metrics = [each for each in module.modules() if isinstance(each, Metric)]
    # A metric's states and their defaults are plain attributes that to_empty would leave without values.
    states = [
        ({n: _host(v) for n, v in m._defaults.items()}, {n: _host(getattr(m, n)) for n in m._defaults}) for m in metrics
    ]
    states = comm.broadcast_object(states, None) if metrics else states
    if any(t.is_meta for t in [*module.parameters(), *module.buffers()]):
        module.to_empty(device=device)
        for (first, name), *others in ties:
            for each, other in others:
                setattr(each, other, getattr(first, name))
    for metric, (defaults, current) in zip(metrics, states, strict=True):
        metric._defaults = {name: _to(value, device) for name, value in defaults.items()}
        for name, value in current.items():
            setattr(metric, name, _to(value, device))
    names = {_clean(name) for name, _ in module.named_parameters()}
    is_source = dist.get_rank() == 0
    full: dict[str, Any] = (
        {name: tensor.detach() for name, tensor in source.items() if name in names} if is_source else {}
    )
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    set_model_state_dict(module, full, options=options)
    for name, buffer in module.named_buffers():
        value = source[_clean(name)].detach().to(device) if is_source else buffer
        whole = value.contiguous().clone()
        comm.broadcast(whole.reshape(-1).view(torch.uint8) if whole.numel() else whole)
        buffer.data.copy_(whole)


def _host(value: Any) -> Any:
    """Return a metric's state so that it can be sent; a rank that has it on the meta device sends nothing."""
    if isinstance(value, list):
        return [_host(each) for each in value]
    return None if value.is_meta else value.detach().cpu()


def _to(value: Any, device: torch.device) -> Any:
    return [_to(each, device) for each in value] if isinstance(value, list) else value.to(device)


def _clean(name: str) -> str:
    """Return a parameter's name as the user knows it, without the wrappers'."""
    return name.replace("_orig_mod.", "")
