"""Arguments that are given by name, put where a rule looks for them: tensors by position, numpy's names by torch's."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from types import MethodType
from typing import Any

from torch import Tensor
from torch.overrides import get_testing_overrides

# What torch takes for its own names: https://github.com/pytorch/pytorch/blob/main/torch/csrc/utils/python_arg_parser.cpp.
NUMPY_NAMES = {"axis": "dim", "keepdims": "keepdim", "x": "input", "a": "input", "x1": "input", "x2": "other"}

# Made before a run puts methods of its own in the place of functions of torch, which torch's list would keep for good.
_LISTED = get_testing_overrides()


def by_position(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments and keywords of a call, with its first tensors by position and numpy's names of others exchanged.

    `torch.matmul(input=a, other=b)` becomes `torch.matmul(a, b)`; `x.cumsum(axis=1)` becomes `x.cumsum(dim=1)`.
    """
    if not kwargs or "condition" in kwargs:  # torch's list has other names for those of `torch.where`
        return args, kwargs
    # Of a method the function is kept: the method would keep its object alive, and a model with it, behind a run.
    names = _parameters(function.__func__)[1:] if isinstance(function, MethodType) else _parameters(function)
    rest = {(NUMPY_NAMES.get(name, name) if name not in names else name): value for name, value in kwargs.items()}
    found = list(args)
    for name in names[len(args) :]:
        if not _has_tensors(rest.get(name)):
            break
        found.append(rest.pop(name))
    if not found:  # the parameters are not known
        found = [rest.pop(name) for name in ("input", "tensors") if name in rest][:1]
    return tuple(found), rest


def _has_tensors(value: Any) -> bool:
    return isinstance(value, Tensor) or (
        isinstance(value, (list, tuple)) and bool(value) and all(isinstance(each, Tensor) for each in value)
    )


@lru_cache(maxsize=1024)
def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of a function's parameters in their order; those of builtins are torch's own list."""
    known = _LISTED.get(function)
    for each in (function, known):
        try:
            found = inspect.signature(each)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            continue
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        names = [name for name, each in found.parameters.items() if each.kind in kinds]
        return tuple(names[: names.index("out")] if "out" in names else names)  # which is given by name alone
    return ()
