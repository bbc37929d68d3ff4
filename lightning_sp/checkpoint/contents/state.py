"""What a checkpoint says of the model and its optimizers: tensors by the names that the user knows, whatever wraps the modules.

The optimizers' state is read from the optimizer and not through `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`: where
the state is still empty, that takes a step of its own to fill it, which counts in Adam's bias correction, and it raises for plain SGD.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from lightning_sp import comm
from lightning_sp.checkpoint.contents.quantized_states import restored_states, stored_states
from lightning_sp.errors import SequenceParallelError
from lightning_sp.parameter_names import by_user_name, user_name
from lightning_sp.weights.quantized import quantized_parameters
from lightning_sp.weights.single_numbers import in_own_shape, is_single_number, mark_single_number, mark_single_numbers

# What optimizers count by: a number of its own, and no state of its parameter's shape.
_STEP = "step"


def model_state(module: nn.Module) -> dict[str, Any]:
    """Return references to the module's sharded state. The caller has resharded the module.

    A parameter with several names (tied weights) is there under each of them, as a strict load wants. What a library stores beside a quantized
    weight (bitsandbytes: `weight.absmax`, ...) is not there: no `load_state_dict` takes it.
    """
    beside = tuple(f"{user_name(name)}." for name in quantized_parameters(module))
    return {name: value for name, value in _named_state(module).items() if not name.startswith(beside)}


def whole_state_dict(module: nn.Module, *, keep: bool) -> dict[str, Tensor]:
    """Return a resharded module's whole tensors in host memory, by the user's names. Every rank must call it.

    Args:
        module: all of a model, or a part of it.
        keep: False where the tensors are not wanted: they are gathered with the others, and let go one by one.

    Communicates: an all_gather of each sharded tensor, behind `comm.come_together`.
    """
    comm.come_together()
    whole = {}
    for name, value in _named_state(module).items():
        tensor = in_own_shape(value.full_tensor(), value) if isinstance(value, DTensor) else value
        if keep and isinstance(tensor, Tensor):
            whole[name] = tensor.detach().cpu().clone()
    return whole


def _named_state(module: nn.Module) -> dict[str, Any]:
    """Return references to the module's sharded state by the user's names, in which single numbers are known as such."""
    mark_single_numbers(module)
    state = by_user_name(module.state_dict())
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if is_single_number(parameter) and isinstance(value := state.get(user_name(name)), DTensor):
            mark_single_number(value)
    return state


def load_model_state(module: nn.Module, state: Mapping[str, Any], *, strict: bool) -> None:
    """Load sharded or whole tensors into the resharded module.

    A whole tensor must be the same on all ranks: each takes its own part of it, without communication.

    Communicates: an all_gather of each tensor that is split otherwise than the module's.
    """
    module.load_state_dict(sharded_state(module, state), strict=strict)


def sharded_state(module: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state by the resharded module's own names, its whole tensors split as the module's are: what its `load_state_dict` takes.

    A whole tensor must be the same on all ranks: each takes its own part of it, without communication.
    """
    own, marked = (
        by_user_name({name: (name, value) for name, value in module.state_dict().items()}),
        _named_state(module),
    )
    named = {}
    for name, value in by_user_name(state).items():
        module_name, target = own.get(name, (name, None))
        named[module_name] = sharded_like(value, marked.get(name, target))
    return named


def optimizer_state(module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return the optimizer's state by parameter name: ``{"state": {name: {...}}, "param_groups": [{"params": [name, ...], ...}]}``.

    Raises:
        SequenceParallelError: the optimizer holds a parameter that is not the module's.
    """
    names = _names(module)
    mark_single_numbers(module)
    groups = [
        {**group, "params": [_name_of(parameter, names) for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    state = {_name_of(each, names): stored_states(optimizer, each, values) for each, values in optimizer.state.items()}
    for each in optimizer.state:
        for value in state[_name_of(each, names)].values() if is_single_number(each) else ():
            if isinstance(value, DTensor) and value.shape == each.shape:
                mark_single_number(value)
    return {"class": type(optimizer).__name__, "state": state, "param_groups": groups}


def load_optimizer_state(module: nn.Module, optimizer: Optimizer, stored: Mapping[str, Any], *, index: int) -> None:
    """Load what `optimizer_state` returned, or a plain optimizer's state dict (parameters by number, whole tensors).

    Args:
        module: holds the parameters.
        optimizer: of this run, its state empty.
        stored: the state; sharded tensors may be of other degrees' shape, whole ones are split here.
        index: the optimizer's number, for messages.

    Raises:
        SequenceParallelError: another class of optimizer, or other parameter groups, with their names.
    """
    names = _names(module)
    mark_single_numbers(module)
    own_groups = [[_name_of(p, names) for p in group["params"]] for group in optimizer.param_groups]
    parameters = {_name_of(p, names): p for group in optimizer.param_groups for p in group["params"]}
    stored_groups = [list(group["params"]) for group in stored["param_groups"]]
    if all(isinstance(name, int) for group in stored_groups for name in group):
        # A plain Lightning checkpoint: parameters are numbered in the order of the groups.
        _check_groups(index, [len(group) for group in own_groups], [len(group) for group in stored_groups])
        by_number = dict(zip(chain(*stored_groups), chain(*own_groups), strict=True))
        values = {by_number[number]: state for number, state in stored["state"].items()}
    else:
        own_kind = type(optimizer).__name__
        kind = stored.get("class", own_kind)
        if kind != own_kind:
            raise SequenceParallelError(
                f"optimizer {index} of the checkpoint is {kind}, this run's is {own_kind}: its state would not fit; configure "
                f"{kind}, or load the weights alone (lightning_sp.export_checkpoint)"
            )
        _check_groups(index, [sorted(group) for group in own_groups], [sorted(group) for group in stored_groups])
        values = dict(stored["state"])
    numbers = {name: number for number, name in enumerate(parameters)}
    sharded = {
        n: {k: v if k == _STEP else sharded_like(v, parameters[n]) for k, v in state.items()}
        for n, state in values.items()
    }
    optimizer.load_state_dict(
        {
            "state": {numbers[n]: restored_states(optimizer, parameters[n], state) for n, state in sharded.items()},
            "param_groups": [
                {**group, "params": [numbers[name] for name in own]}
                for group, own in zip(stored["param_groups"], own_groups, strict=True)
            ],
        }
    )


def _check_groups(index: int, own: list[Any], stored: list[Any]) -> None:
    """Refuse other parameter groups than the stored ones: lists of sizes, or of sorted names."""
    if own == stored:
        return
    named = bool(own) and isinstance(own[0], list)
    message = f"optimizer {index}: the checkpoint's parameter groups hold {_sizes(stored)} parameters, this run's {_sizes(own)}"
    if named:
        here, there = ({name for group in groups for name in group} for groups in (own, stored))
        for where, names in (("in this run", here - there), ("in the checkpoint", there - here)):
            message += f"; only {where}: {', '.join(sorted(names)[:3])}" if names else ""
    raise SequenceParallelError(f"{message}; configure the optimizer with the same groups, in the same order")


def _sizes(groups: list[Any]) -> list[int]:
    return [len(group) if isinstance(group, list) else group for group in groups]


def _names(module: nn.Module) -> dict[int, str]:
    return {id(parameter): user_name(name) for name, parameter in module.named_parameters()}


def _name_of(parameter: Any, names: Mapping[int, str]) -> str:
    name = names.get(id(parameter))
    if name is None:
        raise SequenceParallelError(
            f"an optimizer holds a parameter of shape {tuple(parameter.shape)} that is not the module's: parameters must be those of the "
            "LightningModule when configure_optimizers is called"
        )
    return name


def sharded_like(value: Any, target: Any) -> Any:
    """Split a whole tensor, or one that is split otherwise, as `target` is split; return anything else as it is.

    Communicates: an all_gather of a tensor that is split otherwise.
    """
    if isinstance(value, DTensor) and isinstance(target, Tensor):
        to = (target.device_mesh, target.placements) if isinstance(target, DTensor) else None
        if (value.device_mesh, value.placements) == to or value.shape != target.shape:
            return value
        value = value.full_tensor()
    if not isinstance(value, Tensor) or isinstance(value, DTensor) or not isinstance(target, DTensor):
        return value
    if is_single_number(target) and not value.dim():
        value = value.reshape(1)
    if value.shape != target.shape:
        return value
    with torch.no_grad():
        local = value.detach().to(target.to_local().device)
        # src_data_rank=None: every rank holds the whole and keeps its part.
        return distribute_tensor(local, target.device_mesh, target.placements, src_data_rank=None)
