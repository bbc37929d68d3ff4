"""Functions of torch that are written in Python: without a rule of their own they run as they are written, by the rules of their parts."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

_ASKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def body_of(function: Any) -> Callable[..., Any] | None:
    """Return a function of torch that does not ask its tensors' classes first; None for one that is not written in Python."""
    is_of_torch = isinstance(function, FunctionType) and function.__module__.startswith("torch")
    if not is_of_torch or not set(_ASKS) & set(function.__code__.co_names):
        return None
    # Its names as they are now: a step replaces some of torch's.
    own = {**function.__globals__, **dict.fromkeys(_ASKS, _no)}
    body = FunctionType(function.__code__, own, function.__name__, function.__defaults__, function.__closure__)
    body.__kwdefaults__ = function.__kwdefaults__
    return body


def _no(*_: Any) -> bool:
    return False
