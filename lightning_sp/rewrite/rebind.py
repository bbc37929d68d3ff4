"""Names that a model's files bound to a function by `from ... import ...`, and attributes of its modules: bound to another function.

Replacing an attribute of torch's module does not reach them. Searched: all loaded modules of the packages that the model's classes come from,
but torch's own, the attributes of the model's modules, dicts in either, and default arguments in the files of its classes. A compiled one counts
too, `torch.compile(flex_attention)`, and a `functools.partial` of one.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

from torch import nn

# Of torch's modules the attribute itself is replaced; the others hold no models of users.
_NOT_SEARCHED = {"torch", "builtins", "abc", "typing", "lightning", "lightning_sp", "typing_extensions"}
_Function = Callable[..., Any]


class BoundNames:
    """The names of a model that are bound to functions, found once: a large library has tens of thousands.

    Args:
        root: the model.
    """

    def __init__(self, root: nn.Module) -> None:
        # By the function's identity: not every callable can be hashed. The values are held, so that none is another's later.
        self._names: dict[int, list[tuple[dict[str, Any], str, Any]]] = defaultdict(list)
        self._defaults: dict[int, list[FunctionType]] = defaultdict(list)
        files = {each.__module__ for kind in {type(m) for m in root.modules()} for each in kind.__mro__}
        packages = {file.partition(".")[0] for file in files} - _NOT_SEARCHED
        for holder, name, value in _names(root, packages):
            self._names[id(_function_of(value))].append((holder, name, value))
        for function in _functions(files, packages):
            for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
                if callable(value):
                    self._defaults[id(_function_of(value))].append(function)

    def rebind(self, original: _Function, make: Callable[[_Function], _Function], undo: ExitStack) -> None:
        """Bind each name that is bound to a function to another one.

        Args:
            original: the function.
            make: from what a name was bound to, the function or a compiled one, to what it is bound to.
            undo: takes that back.
        """
        for holder, name, value in self._names.get(id(original), ()):
            holder[name] = _bound(value, make)
            undo.callback(partial(holder.__setitem__, name, value))
        for function in self._defaults.get(id(original), ()):
            _rebind_defaults(function, original, make, undo)

    def rebind_to(self, original: _Function, own: _Function, undo: ExitStack) -> None:
        """Bind each name that is bound to a function, compiled or not, to another one; `undo` takes that back."""
        self.rebind(original, lambda _: own, undo)


def _names(root: nn.Module, packages: set[str]) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Yield what is callable of the names of files, the attributes of modules, and the dicts in either: (holder, name, value)."""
    loaded = [m for name, m in list(sys.modules.items()) if name.partition(".")[0] in packages]
    # Only a file's or an object's own names: asking a lazy module for one would load it.
    outer: list[dict[str, Any]] = [vars(module) for module in loaded if isinstance(module, ModuleType)]
    outer += [vars(module) for module in root.modules()]
    within: dict[int, dict[str, Any]] = {}  # by identity: one table may be held by several
    for holder in outer:
        for name, value in list(holder.items()):
            if callable(value):
                yield holder, name, value
            elif type(value) is dict and name != "__builtins__":
                within[id(value)] = value
    for holder in within.values():
        yield from ((holder, name, value) for name, value in list(holder.items()) if callable(value))


def _functions(files: set[str], packages: set[str]) -> Iterator[FunctionType]:
    """Yield the functions of files, and of the classes in them."""
    for file in (sys.modules[name] for name in files if name.partition(".")[0] in packages and name in sys.modules):
        for value in list(vars(file).values()):
            of_class = (
                list(vars(value).values()) if isinstance(value, type) and value.__module__ == file.__name__ else [value]
            )
            yield from (each for each in of_class if isinstance(each, FunctionType))


def _rebind_defaults(
    function: FunctionType, original: _Function, make: Callable[[_Function], _Function], undo: ExitStack
) -> None:
    def bound(value: Any) -> Any:
        return _bound(value, make) if callable(value) and _function_of(value) is original else value

    if defaults := function.__defaults__:
        function.__defaults__ = tuple(bound(each) for each in defaults)
        undo.callback(setattr, function, "__defaults__", defaults)
    if by_name := function.__kwdefaults__:
        function.__kwdefaults__ = {name: bound(each) for name, each in by_name.items()}
        undo.callback(setattr, function, "__kwdefaults__", by_name)


def _bound(value: Any, make: Callable[[_Function], _Function]) -> _Function:
    """Return what a name is bound to instead of a function, or of a partial of one."""
    return partial(make(value.func), *value.args, **value.keywords) if type(value) is partial else make(value)


def _function_of(value: Any) -> Any:
    """Return the function that a callable is, that it is a partial of, or that torch compiled it from."""
    function = value.func if type(value) is partial else value
    return getattr(function, "__dict__", {}).get("_torchdynamo_orig_callable", function)
