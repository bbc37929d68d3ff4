"""Initial weights: rank 0's are broadcast to every rank, bit for bit, for any degrees; the others may be on the meta device.

Rank 0 builds the model as a single process would, with the same draws of the same generator. The others build it on the meta device where
they can (`configure_model`) and receive only their shards, tensor by tensor: no rank but 0 ever has the whole model in memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

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
    """Return references to the memory of all whole parameters and buffers, by name: made before sharding, broadcast after it.

    Not to the parameters themselves: FSDP2 moves those to its device in place, whole, and a reference would keep them in its memory.
    """
    return {name: tensor.detach() for name, tensor in (*module.named_parameters(), *module.named_buffers())}


class ParameterOwner(NamedTuple):
    """A module, and the name under which it has a parameter."""

    module: nn.Module
    name: str


def tied_parameters(module: nn.Module) -> list[list[ParameterOwner]]:
    """Return the owners of each parameter that has several: moving off the meta device would untie them."""
    owners: dict[Tensor, list[ParameterOwner]] = {}
    for each in module.modules():
        for name, parameter in each.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(parameter, []).append(ParameterOwner(each, name))
    return [several for several in owners.values() if len(several) > 1]


def broadcast_initial_weights(
    module: nn.Module, source: dict[str, Tensor], ties: list[list[ParameterOwner]], device: torch.device
) -> None:
    """Fill the sharded module of every rank with rank 0's parameters, buffers and metrics' states.

    Args:
        module: the sharded module; its parameters may be on the meta device on ranks other than 0.
        source: rank 0's `whole_state` from before sharding; ignored elsewhere.
        ties: `tied_parameters` from after sharding.
        device: where buffers and shards live.

    Communicates: a broadcast of each parameter and buffer from rank 0.
    """
    metrics = [each for each in module.modules() if isinstance(each, Metric)]
    states = [_MetricState.of(each) for each in metrics]
    states = comm.broadcast_object(states, None) if metrics else states
    if any(t.is_meta for t in [*module.parameters(), *module.buffers()]):
        module.to_empty(device=device)
        for first, *others in ties:
            for other in others:
                setattr(other.module, other.name, getattr(first.module, first.name))
    for metric, state in zip(metrics, states, strict=True):
        state.restore(metric, device)
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


class _MetricState(NamedTuple):
    """A metric's states and their defaults: plain attributes, which `to_empty` would leave without values."""

    defaults: dict[str, Any]
    current: dict[str, Any]

    @classmethod
    def of(cls, metric: Metric) -> _MetricState:
        return cls(
            {name: _host(value) for name, value in metric._defaults.items()},
            {name: _host(getattr(metric, name)) for name in metric._defaults},
        )

    def restore(self, metric: Metric, device: torch.device) -> None:
        metric._defaults = {name: _to(value, device) for name, value in self.defaults.items()}
        for name, value in self.current.items():
            setattr(metric, name, _to(value, device))


def _host(value: Any) -> Any:
    """Return a metric's state on the host, to be sent; None for one on the meta device."""
    if isinstance(value, list):
        return [_host(each) for each in value]
    return None if value.is_meta else value.detach().cpu()


def _to(value: Any, device: torch.device) -> Any:
    return [_to(each, device) for each in value] if isinstance(value, list) else value.to(device)


def _clean(name: str) -> str:
    """Return a parameter's name without those of the wrappers around its modules."""
    return name.replace("_orig_mod.", "")
