"""Outputs that FSDP2 does not see: it gathers a unit for its backward by hooks on the tensors that it finds in the unit's output.

It looks into tuples, lists and dicts, and into dataclasses since torch 2.13. What another object holds would come back to parameters that are
not there, which ends in an error of storages. So would an output that is a view, `head(x).view(-1, V)`, and that is written to in place
afterwards: it loses its hooks, and what it is a view of keeps its own. And so would what a unit puts into an object that it is given, a cache
of keys, where a step reads that and not the unit's output.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_sp.global_view.calls.taken_tokens import sources

# Of objects in objects.
_MAX_DEPTH = 8
_PLAIN = (str, bytes, int, float, complex, type(None), type, torch.dtype, torch.device, nn.Module)


def find_outputs_in_objects(modules: Iterable[Any]) -> None:
    """Let each sharded module see the tensors in its outputs, whatever holds them."""
    for module in modules:
        call = _Call()
        module.register_forward_pre_hook(call.enter, with_kwargs=True)
        module.register_forward_hook(call.leave, with_kwargs=True)


class _Call:
    """A sharded module's call in progress; a class because it notes what the objects given to it hold. A copy of the model has its own."""

    def __init__(self) -> None:
        # By id, and kept until the call ends: another tensor would have the id of one that is gone.
        self.given: dict[int, Tensor] = {}

    def enter(self, module: Any, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling() and torch.is_grad_enabled():
            self.given = {id(each): each for each in _hidden((args, kwargs))}

    def leave(self, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        register_outputs_in_objects(module, output)
        register_sources_of_views(module, args, output)
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        if put := [each for each in _hidden((args, kwargs)) if id(each) not in self.given]:
            module._get_fsdp_state()._register_pre_backward_hook(put)
        self.given = {}


def register_outputs_in_objects(module: Any, output: Any) -> None:
    """Gather a sharded module for the backward of the tensors that objects in its output hold."""
    # What is compiled returns what torch can trace.
    if torch.compiler.is_compiling() or isinstance(output, Tensor) or not torch.is_grad_enabled():
        return
    if hidden := list(_hidden(output)):
        module._get_fsdp_state()._register_pre_backward_hook(hidden)


def register_sources_of_views(module: Any, args: Any, output: Any) -> None:
    """Gather a sharded module for the backward of what its outputs are views of, but for its inputs."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return
    if found := _sources(output):
        given = {*_sources(args), *map(id, _hidden(args, inside=True))}
        if own := [source for each, source in found.items() if each not in given]:
            module._get_fsdp_state()._register_pre_backward_hook(own)


def _sources(value: Any) -> dict[int, Tensor]:
    """Return what tensors with a gradient are views of, by its id."""
    found = (source for each in _hidden(value, inside=True) for source in sources(each))
    return {id(each): each for each in found if each.requires_grad}


def _hidden(
    value: Any, *, inside: bool = False, depth: int = 0, seen: dict[tuple[int, bool], int] | None = None
) -> Iterator[Tensor]:
    """Yield the tensors with a gradient that objects hold, at any depth.

    Args:
        value: what is looked into.
        inside: tensors outside of objects count, too.
        depth: of objects and containers around the value.
        seen: of those that were looked into, and the least depth: objects may know each other.
    """
    seen = {} if seen is None else seen
    if isinstance(value, Tensor):
        if inside and value.requires_grad:
            yield value
    elif depth < seen.get((id(value), inside), _MAX_DEPTH) and not isinstance(value, _PLAIN):
        seen[id(value), inside] = depth
        contained, is_object = _contents(value)
        for each in contained:
            yield from _hidden(each, inside=inside or is_object, depth=depth + 1, seen=seen)


def _contents(value: Any) -> tuple[list[Any], bool]:
    """Return what a value holds, and whether it is an object that torch does not look into."""
    if isinstance(value, dict):
        return list(value.values()), False
    if isinstance(value, (list, tuple)):
        return list(value), False
    if dataclasses.is_dataclass(value):
        return [getattr(value, field.name) for field in dataclasses.fields(value)], True
    return list(getattr(value, "__dict__", {}).values()), True
