"""Outputs in objects of a user's own class: FSDP2 gathers a unit for its backward by hooks on the tensors that it finds in the unit's output.

It looks into tuples, lists and dicts, and into dataclasses since torch 2.13. What another object holds would come back to parameters that are
not there, which ends in an error of storages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

# Of objects in objects.
_MAX_DEPTH = 8
_PLAIN = (str, bytes, int, float, complex, type(None), type, torch.dtype, torch.device, nn.Module)


def find_outputs_in_objects(modules: Iterable[Any]) -> None:
    """Let each sharded module see the tensors in its outputs, whatever holds them."""
    for module in modules:
        module.register_forward_hook(_hook)


def _hook(module: Any, args: Any, output: Any) -> None:
    register_outputs_in_objects(module, output)


def register_outputs_in_objects(module: Any, output: Any) -> None:
    """Gather a sharded module for the backward of the tensors that objects in its output hold."""
    # What is compiled returns what torch can trace.
    if torch.compiler.is_compiling() or isinstance(output, Tensor) or not torch.is_grad_enabled():
        return
    if hidden := list(_hidden(output, inside=False, depth=0)):
        module._get_fsdp_state()._register_pre_backward_hook(hidden)


def _hidden(value: Any, *, inside: bool, depth: int) -> Iterator[Tensor]:
    """Yield the tensors with a gradient that objects hold, at any depth."""
    if isinstance(value, Tensor):
        if inside and value.requires_grad:
            yield value
    elif depth < _MAX_DEPTH and not isinstance(value, _PLAIN):
        contained, is_object = _contents(value)
        for each in contained:
            yield from _hidden(each, inside=inside or is_object, depth=depth + 1)


def _contents(value: Any) -> tuple[list[Any], bool]:
    """Return what a value holds, and whether it is an object that torch does not look into."""
    if isinstance(value, dict):
        return list(value.values()), False
    if isinstance(value, (list, tuple)):
        return list(value), False
    if dataclasses.is_dataclass(value):
        return [getattr(value, field.name) for field in dataclasses.fields(value)], True
    return list(getattr(value, "__dict__", {}).values()), True
