"""What a function of positions can say, as a value: functions of equal contents answer alike.

    lambda b, h, q, k: q - k < window           its code, and the number behind `window`
    lambda b, h, q, k: ids[b, q] == ids[b, k]    its code, and which memory `ids` is, in which version
    lambda b, h, q, k: q - k < self.window       its code, and the number behind `self.window`
    lambda b, h, q, k: self.sees(q, k, self)     unknown: what an object holds may change, and nothing shows it

Known are functions that read numbers, tensors, libraries and functions like themselves, by closures, defaults, names of their files and
attributes of objects, and that write to none of these.
"""

from __future__ import annotations

import builtins
import dis
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

_NUMBERS = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)
_LIBRARIES = ("torch", "math", "operator", "builtins")
# How the names of instructions begin that read and write a function's variables, and those of its file.
_VARIABLES, _GLOBALS, _TO_VARIABLES = (
    ("LOAD_DEREF", "LOAD_FAST", "LOAD_CLASSDEREF"),
    ("LOAD_GLOBAL", "LOAD_NAME"),
    ("STORE_", "DELETE_"),
)
_OF_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
_WRITES = ("STORE_GLOBAL", "DELETE_GLOBAL", "STORE_ATTR", "DELETE_ATTR", "STORE_SUBSCR", "DELETE_SUBSCR", "IMPORT_NAME")


class UnknownContentsError(Exception):
    """A function reads what is no value, or writes."""


class Contents:
    """Collects what is read; a class because the memory that tensors have must still be theirs when it is compared.

    Attributes:
        storages: of the tensors.
    """

    def __init__(self) -> None:
        self.storages: list[StorageWeakRef] = []
        self._within: list[CodeType] = []

    def of(self, value: Any) -> Any:
        """Return a value to compare by.

        Raises:
            UnknownContentsError: there is none.
        """
        if isinstance(value, _NUMBERS):
            return type(value), value
        if isinstance(value, Tensor):
            return self._of_tensor(value)
        if isinstance(value, (tuple, list)):
            return type(value), *(self.of(each) for each in value)
        if isinstance(value, partial):
            return partial, self.of(value.func), self.of(value.args), self.of([*value.keywords.items()])
        if isinstance(value, FunctionType):
            return self._of_function(value, {})
        if isinstance(value, MethodType) and isinstance(value.__func__, FunctionType):
            (first, *_) = value.__func__.__code__.co_varnames or ("",)
            return self._of_function(value.__func__, {first: value.__self__})
        if isinstance(value, ModuleType) and value.__name__.partition(".")[0] in _LIBRARIES:
            return ModuleType, value.__name__
        of_library = isinstance(value, BuiltinFunctionType) and isinstance(value.__self__, (ModuleType, type(None)))
        if of_library or (isinstance(value, type) and value.__module__ == "builtins"):
            return value
        raise UnknownContentsError(type(value))

    def _of_tensor(self, tensor: Tensor) -> Any:
        # Of inference mode no version shows a change, and of a subclass no memory.
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.is_inference():
            raise UnknownContentsError(type(tensor))
        self.storages.append(StorageWeakRef(tensor.untyped_storage()))  # type: ignore[no-untyped-call]
        return Tensor, tensor.data_ptr(), tensor._version, tensor.shape, tensor.stride(), tensor.dtype, tensor.device

    def _of_function(self, function: FunctionType, given: dict[str, Any]) -> Any:
        """Return the contents of a function whose arguments of some names are known: a method's object."""
        code = function.__code__
        if function.__module__.partition(".")[0] in _LIBRARIES or code in self._within:  # it may call itself
            return code
        if vars(function):
            raise UnknownContentsError(function)
        self._within.append(code)
        try:
            read = [(name, self._as_read(_named(function, given, name), paths)) for name, paths in _read(code, given)]
            defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).items()]
            return code, tuple(read), self.of(defaults)
        finally:
            self._within.pop()

    def _as_read(self, value: Any, paths: list[tuple[str, ...]]) -> Any:
        """Return a value, or of an object the attributes that are read of it."""
        try:
            return self.of(value)
        except UnknownContentsError:
            if not all(paths):  # the object itself is handed on
                raise
        return tuple((path, self.of(_attribute(value, path))) for path in paths)


def _read(code: CodeType, given: dict[str, Any]) -> Iterator[tuple[str, list[tuple[str, ...]]]]:
    """Yield the names that a function reads from outside, and which attributes of each.

    Raises:
        UnknownContentsError: it writes to one.
    """
    paths: defaultdict[str, set[tuple[str, ...]]] = defaultdict(set)
    codes, outside = [*_codes(code)], {*given, *code.co_freevars}
    own = {name for each in codes for name in each.co_cellvars} - given.keys()
    if not own.isdisjoint(code.co_freevars):  # two variables of one name
        raise UnknownContentsError(code)
    for each in codes:
        root, path = "", tuple[str, ...]()
        for instruction in dis.get_instructions(each):
            name, what = instruction.opname, instruction.argval
            names = what if isinstance(what, tuple) else (what,)  # some load two at once
            if name in _WRITES or (name.startswith(_TO_VARIABLES) and not outside.isdisjoint(names)):
                raise UnknownContentsError(code)
            if root and name in _OF_ATTRIBUTES:
                path += (what,)
                continue
            if root:
                paths[root].add(path)
            is_read = name.startswith(_VARIABLES)
            read = [n for n in names if name.startswith(_GLOBALS) or (is_read and n in outside)]
            root, path = read[-1] if read else "", ()
            for other in read[:-1]:
                paths[other].add(())
    yield from ((name, sorted(found)) for name, found in sorted(paths.items()))


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield a function's code and that of the functions that it makes."""
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _codes(each)


def _named(function: FunctionType, given: dict[str, Any], name: str) -> Any:
    if name in given:
        return given[name]
    if name in function.__code__.co_freevars:
        cell = (function.__closure__ or ())[function.__code__.co_freevars.index(name)]
        try:
            return cell.cell_contents
        except ValueError as error:  # an empty one
            raise UnknownContentsError(function) from error
    if name in function.__globals__:
        return function.__globals__[name]
    if hasattr(builtins, name):
        return getattr(builtins, name)
    raise UnknownContentsError(name)


def _attribute(value: Any, path: tuple[str, ...]) -> Any:
    """Return an attribute of an object, of its attribute and so on, where that is a name of it or its class and runs no code."""
    for name in path:
        if isinstance(value, Tensor) or not _is_plain(value, name):
            raise UnknownContentsError(type(value))
        value = getattr(value, name)
    return value


def _is_plain(value: Any, name: str) -> bool:
    own = getattr(value, "__dict__", {})
    if name in own:
        return True
    if isinstance(value, nn.Module) and any(name in own[kind] for kind in ("_parameters", "_buffers", "_modules")):
        return True
    of_class = next((vars(kind)[name] for kind in type(value).__mro__ if name in vars(kind)), None)
    return isinstance(of_class, (*_NUMBERS[:-3], FunctionType, Tensor)) if of_class is not None else False
