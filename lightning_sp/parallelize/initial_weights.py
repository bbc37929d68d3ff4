"""Initial weights: rank 0's are broadcast to every rank, bit for bit, for any degrees; the others may be on the meta device.

Rank 0 builds the model as a single process would, with the same draws of the same generator. What is built in `configure_model` has no
memory (`delayed_init`): rank 0 makes it tensor by tensor, and each rank keeps its shard. No rank ever has the whole.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torchmetrics import Metric

from lightning_sp import comm
from lightning_sp.errors import SequenceParallelError
from lightning_sp.parallelize.delayed_init import DelayedWeights
from lightning_sp.parallelize.parts_of_model import differing_parts, parts_of_model
from lightning_sp.parameter_names import shown, user_name
from lightning_sp.weights.quantized import check_same_quantized, move, quantized_parameters


def materialize_meta(module: nn.Module, device: torch.device, delayed: Collection[str] = ()) -> None:
    """Give a single process's meta parameters memory and their modules' own initialisation, in construction order.

    Args:
        module: in which they are.
        device: on which they are made.
        delayed: names of those that have recipes.

    Raises:
        SequenceParallelError: a module holds meta parameters and has no `reset_parameters`.
    """
    known = {id(tensor) for name, tensor in _named_tensors(module) if name in delayed}  # a tied one has other names too
    for name, each in module.named_modules():
        own = [*each.parameters(recurse=False), *each.buffers(recurse=False)]
        if not any(tensor.is_meta and id(tensor) not in known for tensor in own):
            continue
        reset = getattr(each, "reset_parameters", None)
        if reset is None:
            raise SequenceParallelError(
                f"{name or 'the model'} ({type(each).__name__}) was built on the meta device and has no reset_parameters() to initialise it; "
                "define one, or build the model in configure_model without torch.device('meta'): the strategy defers it by itself"
            )
        each.to_empty(device=device, recurse=False)
        reset()


class InitialState:
    """Rank 0's weights by name; a class because what is delayed is made when it is asked for, once."""

    def __init__(self, whole: Mapping[str, Tensor], delayed: DelayedWeights) -> None:
        self._whole, self._delayed = whole, delayed

    @property
    def names(self) -> set[str]:
        """Return all of them."""
        return set(self._whole)

    def take(self, name: str) -> Tensor:
        """Return a whole tensor; it is not asked for again."""
        return self._delayed.take(name) if name in self._delayed.names else self._whole[name]


def whole_state(module: nn.Module) -> dict[str, Tensor]:
    """Return references to the memory of all whole parameters and buffers, by name: made before sharding, broadcast after it.

    Not to the parameters themselves: FSDP2 moves those to its device in place, whole, and a reference would keep them in its memory.
    """
    return {name: tensor.detach() for name, tensor in (*module.named_parameters(), *module.named_buffers())}


def whole_bytes_elsewhere(module: nn.Module) -> int:
    """Return the bytes of a model that a rank other than 0 holds whole, the most of all; 0 where that is less than half of it.

    Communicates: two numbers of each rank.
    """
    sizes = [(0 if each.is_meta else each.nbytes, each.nbytes) for each in module.parameters()]
    held, num_bytes = (sum(each) for each in zip(*sizes, strict=True)) if sizes else (0, 0)
    return max(comm.gather_objects(held if 2 * held >= num_bytes else 0)[1:], default=0)


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
    module: nn.Module,
    source: InitialState,
    ties: list[list[ParameterOwner]],
    device: torch.device,
    *,
    shards_on: torch.device,
) -> None:
    """Fill the sharded module of every rank with rank 0's parameters, buffers and metrics' states.

    Args:
        module: the sharded module; its parameters may be on the meta device on ranks other than 0.
        source: rank 0's weights from before sharding; ignored elsewhere.
        ties: `tied_parameters` from after sharding.
        device: where buffers live.
        shards_on: where shards of parameters do.

    Communicates: the names on rank 0; a broadcast of each parameter and buffer from rank 0.

    Raises:
        SequenceParallelError: a rank has built another model than rank 0, or read other quantized weights.
    """
    _check_same_model(module, source)
    check_same_quantized(module)
    metrics = [each for each in module.modules() if isinstance(each, Metric)]
    states = [_MetricState.of(each) for each in metrics]
    states = comm.broadcast_object(states, None) if metrics else states
    if any(t.is_meta for t in [*module.parameters(), *module.buffers()]):
        move(
            module, lambda tensor: torch.empty_like(tensor, device=shards_on if isinstance(tensor, DTensor) else device)
        )
        for first, *others in ties:
            for other in others:
                setattr(other.module, other.name, getattr(first.module, first.name))
    for metric, state in zip(metrics, states, strict=True):
        state.restore(metric, device)
    _fill_plain_tensors(module, device)
    is_source = dist.get_rank() == 0
    with torch.no_grad():
        for name, tensor in _sent_tensors(module):
            _receive(tensor, source.take(name) if is_source else None, device)


def _named_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def _sent_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Give all but the quantized weights, which each rank has read."""
    whole = quantized_parameters(module)
    return [(name, tensor) for name, tensor in _named_tensors(module) if name not in whole]


def _check_same_model(module: nn.Module, source: InitialState) -> None:
    """Refuse ranks whose parameters and buffers are not those of rank 0, name by name. Every rank must call it."""
    own = {name: (tuple(t.shape), t.dtype, t.requires_grad) for name, t in _named_tensors(module)}
    first, parts_of_first = comm.broadcast_object((own, parts_of_model(module)), None)
    assert dist.get_rank() or source.names == set(own), "sharding has changed names"
    parts = []
    for where, names in (("only here", own.keys() - first.keys()), ("only on rank 0", first.keys() - own.keys())):
        if names:
            parts.append(f"{len(names)} are {where} ({shown(sorted(map(user_name, names)))})")
    if differing := [name for name in own if name in first and own[name] != first[name]]:
        name = differing[0]
        parts.append(
            f"{len(differing)} differ (of {user_name(name)} shape, dtype and requires_grad are {own[name]}, on rank 0 {first[name]})"
        )
    if not parts and list(own) != list(first):
        moved = next(names for names in zip(own, first, strict=True) if names[0] != names[1])
        parts.append(
            f"the order differs, in which messages are told apart: {user_name(moved[0])} where rank 0 has {user_name(moved[1])}"
        )
    if not parts and (said := differing_parts(parts_of_model(module), parts_of_first)):
        parts.append(f"none differ, but {said}")
    comm.agree(
        f"this rank has built another model than rank 0, whose weights it is to train: of {len(own)} parameters and buffers "
        f"{'; '.join(parts)}; build the same model on every rank"
        if parts
        else None
    )


def _fill_plain_tensors(module: nn.Module, device: torch.device) -> None:
    """Give rank 0's values to attributes that are tensors and no buffers, where a rank has them on the meta device."""
    plain = {
        f"{name}.{attribute}": (each, attribute)
        for name, each in module.named_modules()
        for attribute, value in vars(each).items()
        if isinstance(value, Tensor)
    }
    missing = {name for name, (each, attribute) in plain.items() if getattr(each, attribute).is_meta}
    wanted = set().union(*comm.gather_objects(missing))
    if not wanted:
        return
    own = {name: getattr(*plain[name]).detach().cpu() for name in wanted & plain.keys()} if not dist.get_rank() else {}
    values = comm.broadcast_object(own, None)
    lost = sorted(missing - values.keys())
    comm.agree(
        f"{len(lost)} tensors that are no buffers are not rank 0's ({shown(lost)}): register them" if lost else None
    )
    for name in missing:
        each, attribute = plain[name]
        setattr(each, attribute, values[name].to(device))


def _receive(tensor: Tensor, whole: Tensor | None, device: torch.device) -> None:
    """Overwrite a tensor, or this rank's shard of it, with that of rank 0, which alone passes it in whole."""
    if whole is None:
        whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    whole = whole.detach().to(device).reshape(tensor.shape).contiguous()  # shards of a single number have a dim
    if whole.numel():
        comm.broadcast(whole.reshape(-1).view(torch.uint8))
    if isinstance(tensor, DTensor):
        tensor.to_local().copy_(_part(whole, tensor))
    elif tensor.data_ptr() != whole.data_ptr():
        tensor.data.copy_(whole)


def _part(whole: Tensor, like: DTensor) -> Tensor:
    """Return this rank's part of a whole that it has, in the whole's memory."""
    part = whole
    # What FSDP2 shards of a layer that is split along the same dim is a part of that part: `_StridedShard`.
    for axis, placement in sorted(enumerate(like.placements), key=lambda each: isinstance(each[1], _StridedShard)):
        if isinstance(placement, (Shard, _StridedShard)):
            parts = part.chunk(like.device_mesh.size(axis), dim=placement.dim)
            rank = like.device_mesh.get_local_rank(axis)
            part = parts[rank] if rank < len(parts) else part.narrow(placement.dim, 0, 0)
    return part


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
