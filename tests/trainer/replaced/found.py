"""Finds functions of other libraries in whose place this package's stand, by comparing what they hold with what they held before."""

from __future__ import annotations

import functools
import gc
import sys
import types
import warnings
import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import nn

import lightning_sp

PACKAGE = Path(lightning_sp.__file__).parent
# Of Python's own, those that others replace, too.
LIBRARIES = (
    "torch", "torchmetrics", "torchao", "lightning", "lightning_utilities", "transformers", "peft", "bitsandbytes", "numpy",
    "builtins", "os", "sys", "random", "signal", "threading", "multiprocessing", "warnings", "logging", "copy", "pickle", "gc",
    "inspect", "time", "io", "json", "importlib", "weakref", "contextlib",
)  # fmt: skip
OF_AN_OBJECT = " (of an object)"
# A trial puts away the attributes and the globals of a user's code, which this is: what it holds, it does not find there.
_KEPT = "_lightning_sp_tests_replaced"

Place = tuple[str, str]  # what is replaced, and the file of this package that does
Found = dict[Place, set[str]]  # in what it is: "a step", say


def begin(most: int) -> None:
    """Take what libraries hold now as their own, and look at most so often at each kind of moment."""
    left: dict[str, int] = defaultdict(lambda: most)
    before = [(name, names, dict(names)) for name, names in _namespaces()]
    # Models of other runs, which somebody still holds. They are held here, too: another object would get a number that is free.
    earlier = {(id(each), name): each for each, name, _ in _objects()}
    setattr(sys, _KEPT, (before, earlier, F.alpha_dropout, left, {}))


def note(moment: str) -> None:
    """Find what is replaced now; a trial is told from what it was asked in by its dropout, which it takes out."""
    before, earlier, dropout, left, found = getattr(sys, _KEPT)
    if F.alpha_dropout is not dropout:
        moment = "a trial"
    left[moment] -= 1
    if left[moment] < 0:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what is deprecated and looked at
        for place in [*_of_namespaces(before), *_of_objects(earlier)]:
            found.setdefault(place, set()).add(moment)


def end() -> Found:
    """Return what was found, and let go of what libraries held."""
    found: Found = getattr(sys, _KEPT)[-1]
    delattr(sys, _KEPT)
    return found


def _namespaces() -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield libraries' modules and the classes that these define: their names and what they hold."""
    for name, module in list(sys.modules.items()):
        if not isinstance(module, types.ModuleType) or name.partition(".")[0] not in LIBRARIES:
            continue
        yield name, vars(module)
        for attribute, value in list(vars(module).items()):
            # Not isinstance, which asks the object: some warn that they are deprecated.
            if issubclass(type(value), type) and value.__module__ == name:
                yield f"{name}.{attribute}", vars(value)


def _of_namespaces(before: list[tuple[str, Mapping[str, Any], dict[str, Any]]]) -> Iterator[Place]:
    """Yield functions that libraries' modules and classes hold in place of what they held before."""
    for namespace, names, held in before:
        for name, value in list(names.items()):
            if held.get(name) is not value and (file := _file(value)):
                yield f"{namespace}.{name}", file


def _of_objects(earlier: Mapping[tuple[int, str], Any]) -> Iterator[Place]:
    """Yield methods that single objects of libraries' classes have been given in place of their classes', but for earlier ones."""
    for each, name, file in _objects():
        if (id(each), name) not in earlier:
            yield f"{_class_with(name, type(each))}.{name}{OF_AN_OBJECT}", file


def _objects() -> Iterator[tuple[Any, str, str]]:
    """Yield the objects of libraries' classes that hold a method of this package's, its name and its file."""
    of_library: dict[type, bool] = {}
    for each in gc.get_objects():
        kind = type(each)
        if kind not in of_library:
            # A proxy's attributes are those of an object that may be gone.
            of_library[kind] = kind not in weakref.ProxyTypes and kind.__module__.partition(".")[0] in LIBRARIES
        attributes = getattr(each, "__dict__", None) if of_library[kind] else None
        for name, value in list(attributes.items()) if type(attributes) is dict else ():
            if isinstance(name, str) and callable(getattr(kind, name, None)) and (file := _file(value)):
                yield each, name, file


def _class_with(name: str, kind: type) -> str:
    """Return the name of the library's class that a method of an object is from; FSDP2 makes classes of its own of users'."""
    if issubclass(kind, nn.Module) and name == "forward":
        return "torch.nn.Module"
    own = next(each for each in kind.__mro__ if name in vars(each) and each.__module__.partition(".")[0] in LIBRARIES)
    return f"{own.__module__}.{own.__qualname__}"


def _file(value: Any) -> str:
    """Return the file of this package that a function is written in, "" if it is none of its."""
    for _ in range(6):
        inner = getattr(value, "__func__", None) or (value.func if isinstance(value, functools.partial) else None)
        inner = value.fget if isinstance(value, property) else inner
        if inner is None:
            break
        value = inner
    if isinstance(value, types.FunctionType):
        file = value.__code__.co_filename
    else:
        kind = value if isinstance(value, type) else type(value) if callable(value) else type(None)
        file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    inside = Path(file).relative_to(PACKAGE) if Path(file).is_relative_to(PACKAGE) else Path()
    # A model of this package's own is a user's model here.
    return "" if inside.parts[:1] in ((), ("models",)) else str(inside)
