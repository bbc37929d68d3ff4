"""Names that a model's files bound to a function by `from ... import ...`, and attributes of its modules: bound to another function.

Replacing an attribute of torch's module does not reach them. Searched: all loaded modules of the packages that the model's classes come from,
but torch's own, the attributes of the model's modules, dicts in either, and default arguments in the files of its classes. A compiled one counts
too, `torch.compile(flex_attention)`, and a `functools.partial` of one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

from torch import nn

# Of torch's modules the attribute itself is replaced; the others hold no models of users.
_NOT_SEARCHED = {"torch", "builtins", "abc", "typing", "lightning", "lightning_sp", "typing_extensions"}


def rebind(
    root: nn.Module,
    original: Callable[..., Any],
    make: Callable[[Callable[..., Any]], Callable[..., Any]],
    undo: ExitStack,
) -> None:
    """Bind each name of a model that is bound to a function to another one.

    Args:
        root: the model.
        original: the function, compiled or not.
        make: from what a name was bound to, the function or a compiled one, to what it is bound to.
        undo: takes that back.
    """
    packages = {each.__module__.partition(".")[0] for m in root.modules() for each in type(m).__mro__} - _NOT_SEARCHED
    loaded = [m for name, m in list(sys.modules.items()) if name.partition(".")[0] in packages]
    # Only a file's or an object's own names: asking a lazy module for one would load it.
    holders: list[dict[str, Any]] = [vars(module) for module in loaded if isinstance(module, ModuleType)]
    holders += [vars(module) for module in root.modules()]
    holders += [
        value for holder in holders for name, value in holder.items() if type(value) is dict and name != "__builtins__"
    ]
    for holder in holders:
        for name, value in list(holder.items()):
            bound = _bound(value, original, make)
            if bound is not None:
                holder[name] = bound
                undo.callback(partial(holder.__setitem__, name, value))
    for function in _functions({each.__module__ for m in root.modules() for each in type(m).__mro__}, packages):
        _rebind_defaults(function, original, make, undo)


def _functions(files: set[str], packages: set[str]) -> Iterator[FunctionType]:
    """Yield the functions of files, and of the classes in them."""
    for file in (sys.modules[name] for name in files if name.partition(".")[0] in packages and name in sys.modules):
        for value in list(vars(file).values()):
            of_class = (
                list(vars(value).values()) if isinstance(value, type) and value.__module__ == file.__name__ else [value]
            )
            yield from (each for each in of_class if isinstance(each, FunctionType))


def _rebind_defaults(
    function: FunctionType,
    original: Callable[..., Any],
    make: Callable[[Callable[..., Any]], Callable[..., Any]],
    undo: ExitStack,
) -> None:
    defaults, by_name = function.__defaults__, function.__kwdefaults__
    bound = [_bound(each, original, make) for each in defaults or ()]
    if defaults is not None and any(each is not None for each in bound):
        function.__defaults__ = tuple(old if new is None else new for old, new in zip(defaults, bound, strict=True))
        undo.callback(setattr, function, "__defaults__", defaults)
    changed = {name: new for name, old in (by_name or {}).items() if (new := _bound(old, original, make)) is not None}
    if by_name is not None and changed:
        function.__kwdefaults__ = {**by_name, **changed}
        undo.callback(setattr, function, "__kwdefaults__", by_name)


def rebind_to(root: nn.Module, original: Callable[..., Any], own: Callable[..., Any], undo: ExitStack) -> None:
    """Bind each name of a model that is bound to a function, compiled or not, to another one; `undo` takes that back."""
    rebind(root, original, lambda _: own, undo)


def _bound(
    value: Any, original: Callable[..., Any], make: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[..., Any] | None:
    """Return what a value is bound to instead; None where it is neither the function nor a partial of it."""
    if type(value) is partial and _is(value.func, original):
        return partial(make(value.func), *value.args, **value.keywords)
    return make(value) if _is(value, original) else None


def _is(value: Any, original: Callable[..., Any]) -> bool:
    if value is original:
        return True
    # What torch.compile returns for a function.
    return callable(value) and getattr(value, "__dict__", {}).get("_torchdynamo_orig_callable") is original
