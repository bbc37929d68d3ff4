"""Numbers of whole tensors that are known while a compiler traces: masks that a model makes of lengths and buffers.

What the rules do to such a tensor is done to its numbers too, so that a rule may read them: whether a mask is a band, whether one low number
hides all keys of a query. What is read holds for the graph that is traced, and is compared before it is used again (`compiled.known_masks`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from lightning_sp.comm import is_traced

_T = TypeVar("_T")
_NUMBERS = "_lightning_sp_numbers"
_READS = {"__bool__", "__float__", "__int__", "item", "tolist"}


def note_numbers(traced: Tensor, numbers: Tensor) -> None:
    """Note the numbers of a tensor that a compiler traces."""
    setattr(traced, _NUMBERS, numbers)


def numbers_of(tensor: Tensor) -> Tensor | None:
    """Return the numbers of a tensor that a compiler traces, None where they are not known."""
    return getattr(tensor, _NUMBERS, None)


def read(tensor: Tensor, function: Callable[[Tensor], _T]) -> _T | None:
    """Return what a function reads of a traced tensor's numbers, None where they are not known."""
    numbers = numbers_of(tensor)
    if numbers is None:
        return None
    with _disable_current_modes(), torch.no_grad():
        return function(numbers)


class KnownNumbers(TorchFunctionMode):
    """While it is entered, functions of tensors whose numbers are known give some whose numbers are.

    Args:
        shows: the type whose functions the rules have.
    """

    def __init__(self, shows: type) -> None:
        super().__init__()
        self._shows = shows

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Do what a function does, and to the numbers too."""
        given = dict(kwargs or {})
        tensors = [each for each in tree_leaves((args, given)) if isinstance(each, Tensor)]
        if torch._C._is_torch_function_enabled() and any(isinstance(each, self._shows) for each in tensors):
            with self:  # the rules call functions too
                return self._shows.__torch_function__(func, types, args, given)  # type: ignore[attr-defined]
        known = bool(tensors) and all(numbers_of(each) is not None for each in tensors)
        name = getattr(func, "__name__", "")
        if known and name in _READS:
            return self._numbers(func, args, given)
        if name in _READS and any(is_traced(each) for each in tensors):
            raise NotImplementedError("numbers are looked at that are not known before the graph runs")
        result = func(*args, **given)
        if known and isinstance(result, Tensor) and name != "__get__":
            note_numbers(result, self._numbers(func, args, given))
        return result

    def _numbers(self, func: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = tree_map(_real, (args, kwargs))
        with _disable_current_modes(), torch.no_grad():
            return func(*args, **kwargs)


def _real(value: Any) -> Any:
    if isinstance(value, Tensor):
        return numbers_of(value)
    return value.node.hint if isinstance(value, torch.SymInt) else value
