"""FSDP2's units, and their parameter groups, which have no public name: what is gathered and reduced at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed.fsdp import FSDPModule


def fsdp_modules(root: nn.Module) -> list[FSDPModule]:
    """Return the sharded modules, the root first."""
    return [each for each in root.modules() if isinstance(each, FSDPModule)]


def parameter_groups(units: Iterable[FSDPModule]) -> list[Any]:
    """Return the groups of sharded modules, in their order."""
    return [group for unit in units for group in _groups(unit)]


def whole_parameters(root: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that modules show while their unit is gathered, of units that have been gathered once."""
    known = (each for group in parameter_groups(fsdp_modules(root)) for each in group.fsdp_params)
    return [each._unsharded_param for each in known if hasattr(each, "_unsharded_param")]


def sharded_parameter(root: nn.Module, whole: torch.Tensor) -> nn.Parameter | None:
    """Return the shard of a parameter that a module shows while its unit is gathered; None for any other tensor."""
    known = (each for group in parameter_groups(fsdp_modules(root)) for each in group.fsdp_params)
    return next((each.sharded_param for each in known if getattr(each, "_unsharded_param", None) is whole), None)


def is_freed_after_forward(unit: FSDPModule) -> bool:
    """Return whether a unit's whole parameters are freed when its forward ends, and not only after its backward."""
    return any(group._reshard_after_forward for group in parameter_groups([unit]))


def told_before_freed(root: nn.Module, weight: torch.Tensor, tell: Callable[[], None]) -> ExitStack:
    """Call a function before whole parameters are freed that a weight is among, until what is returned closes: behind a backward, say.

    Args:
        root: the sharded module.
        weight: as a module shows it outside of its forward.
        tell: called while they are whole.
    """
    undo = ExitStack()
    for group in parameter_groups(fsdp_modules(root)):
        if any(each.sharded_param is weight for each in group.fsdp_params):
            for name in ("_to_sharded", "_to_sharded_post_forward"):
                # Of a head before this one, whose weight is among them, too.
                undo.callback(_put_back, group, name, vars(group).get(name))
                setattr(group, name, _telling(group, getattr(group, name), tell))
    return undo


def _put_back(group: Any, name: str, before: Callable[[], None] | None) -> None:
    if before is None:
        delattr(group, name)
    else:
        setattr(group, name, before)


def _telling(group: Any, free: Callable[[], None], tell: Callable[[], None]) -> Callable[[], None]:
    def told() -> None:
        if group.is_unsharded:
            tell()
        free()

    return told


def shares_parameters(root: nn.Module, unit: nn.Module) -> bool:
    """Return whether a parameter of `unit` is also reached another way: in FSDP2 each belongs to one group."""
    own = {parameter for each in unit.modules() for parameter in each.parameters(recurse=False)}
    elsewhere, found = [root], {root}
    while elsewhere:
        new = {child for child in elsewhere.pop().children() if child is not unit} - found
        found |= new
        elsewhere.extend(new)
    return any(parameter in own for each in found for parameter in each.parameters(recurse=False))


def gather_here(parameter: Any) -> None:
    """Let a whole parameter be where FSDP2 gathers it, after `parameter.data = ...`: the next gather writes there, freed or not."""
    gathered = parameter.all_gather_outputs[0] if len(parameter.all_gather_outputs) == 1 else None
    whole = parameter._unsharded_param
    # One of another class, an `AutocastWeight` say, has no memory of its own.
    if (
        gathered is None
        or type(whole) is not nn.Parameter
        or gathered.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    ):
        return
    memory = gathered.untyped_storage()
    is_free = memory.size() == 0
    if is_free:
        memory.resize_(gathered.numel() * gathered.element_size())
    place = torch.as_strided(gathered, parameter._orig_size, parameter._contiguous_orig_stride, storage_offset=0)
    with _unsafe_preserve_version_counter((place, whole)):  # a graph that has saved it finds the same numbers
        place.copy_(whole)
        whole.data = place
    if is_free:
        memory.resize_(0)


def _groups(unit: FSDPModule) -> list[Any]:
    state: Any = unit._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    # torch before 2.13 has one.
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []
