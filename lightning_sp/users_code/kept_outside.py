"""What the user's code keeps outside of its objects: attributes of classes, what functions close over, names of files.

    Meter.seen += 1         a class' attribute counts each forward, and each trial
    LOSSES.append(loss)     and so does a list of a file

`kept_outside` gives it by name, so that it can be put back as attributes of modules are. Libraries' objects and files on a disk cannot be
known.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from types import CellType, FunctionType, ModuleType
from typing import Any, NamedTuple

from lightning_sp.users_code.contents import Place
from lightning_sp.users_code.iterators import takes_from_iterators
from lightning_sp.users_code.ownership import is_file_of_user, is_object_of_user

NUMBERS = (bool, int, float, str, type(None))
_CONTAINERS = (list, dict, set, deque)


class Kept(NamedTuple):
    """What code keeps outside of an object.

    Args:
        name: as a user would write it, behind the class, function or file that it is in.
        value: what it is now.
        put: puts the name itself back.
        exchange: gives the name another value; None where that cannot be.
        cell: of a closure, in which the name is.
        place: of the name: a class, a file or a cell; None where there is none.
    """

    name: str
    value: Any
    put: Callable[[], object]
    exchange: Callable[[Any], object] | None = None
    cell: CellType | None = None
    place: Place | None = None


def kept_outside(owners: list[Any]) -> Iterator[Kept]:
    """Yield what the code of objects keeps outside of them.

    Args:
        owners: modules and callbacks.
    """
    seen = _Seen()
    for each in dict.fromkeys(kind for owner in owners for kind in type(owner).__mro__):
        # FSDP2 gives a module a class of its own, behind which the user's stands: `type(self).seen += 1` writes to that.
        if any(is_file_of_user(kind.__module__) for kind in each.__mro__):
            yield from _of_class(each, seen)
    for value in (value for owner in owners for value in _attributes(owner)):
        called = value.func if isinstance(value, partial) else value
        if isinstance(called, FunctionType):
            yield from _of_function(called, seen)
        elif is_object_of_user(value):
            for each in type(value).__mro__:
                yield from _of_class(each, seen) if is_file_of_user(each.__module__) else ()
    # One after the other: files that import each other are many.
    num_own = len(seen.files)
    for number, names in enumerate(seen.files):
        yield from _of_file(names, seen, follows=number < num_own)


class _Seen:
    """What was looked at, and the files that are to be; a class because they are found on the way."""

    def __init__(self) -> None:
        self.ids: set[int] = set()
        self.files: list[dict[str, Any]] = []

    def is_new(self, value: Any) -> bool:
        """Return whether a value is met for the first time."""
        is_new = id(value) not in self.ids
        self.ids.add(id(value))
        return is_new

    def add_file(self, names: dict[str, Any]) -> None:
        """Look at the names of a file later."""
        if self.is_new(names):
            self.files.append(names)


def _attributes(owner: Any) -> Iterator[Any]:
    """Yield the values of an object's attributes, and of a module's hooks."""
    for name, value in vars(owner).items():
        yield from value.values() if "_hooks" in name and isinstance(value, dict) else (value,)


def _of_class(kind: type, seen: _Seen) -> Iterator[Kept]:
    if not seen.is_new(kind):
        return
    place = Place(kind, partial(_plain_names, kind), partial(_restore_names, kind))
    yield Kept(kind.__name__, None, partial(_restore_names, kind, _plain_names(kind)), place=place)
    for name, value in list(vars(kind).items()):
        function = _function(value)
        if function is not None:
            yield from _of_function(function, seen)
        elif not name.startswith("__") and type(value) in _CONTAINERS:
            yield Kept(f"{kind.__name__}.{name}", value, _nothing)
        elif takes_from_iterators(value):
            yield Kept(f"{kind.__name__}.{name}", value, _nothing, partial(setattr, kind, name))
        elif isinstance(value, type) and is_file_of_user(value.__module__):
            yield from _of_class(value, seen)
        elif is_object_of_user(value):  # the one of its class, say
            yield Kept(f"{kind.__name__}.{name}", value, _nothing)
            yield from _of_class(type(value), seen)


def _plain_names(kind: type) -> dict[str, Any]:
    """Return what a class has under its names, but for its methods and what Python has there."""
    return {
        name: value
        for name, value in vars(kind).items()
        if not name.startswith(("__", "_abc_")) and _function(value) is None and not hasattr(value, "__set__")
    }


def _restore_names(kind: type, before: dict[str, Any]) -> None:
    now = _plain_names(kind)
    for name in now.keys() - before.keys():
        delattr(kind, name)
    for name, value in before.items():
        if name not in now or now[name] is not value:
            setattr(kind, name, value)


def _of_function(function: FunctionType, seen: _Seen) -> Iterator[Kept]:
    if not is_file_of_user(function.__module__ or "") or not seen.is_new(function):
        return
    attributes = vars(function)
    own = function.__qualname__.replace(".<locals>", "")
    yield Kept(own, attributes, _nothing)
    for i, value in enumerate(function.__defaults__ or ()):
        yield Kept(f"{own}.{i}", value, _nothing, partial(_put_default, function, i))
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        with suppress(ValueError):  # an empty one
            value = cell.cell_contents
            if (inner := _function(value)) is not None:
                yield from _of_function(inner, seen)
            else:
                put = partial(_refill, cell, value)
                place = Place(cell, partial(_contents_of_cell, cell), partial(_put_in_cell, cell))
                yield Kept(f"{own}.{name}", value, put, partial(setattr, cell, "cell_contents"), cell, place)
    seen.add_file(function.__globals__)


def _of_file(names: dict[str, Any], seen: _Seen, *, follows: bool) -> Iterator[Kept]:
    """Yield what a file keeps, and note the files of functions that it names, and those that it imports as a whole."""
    for name, value in list(names.items()):
        if name.startswith("__"):
            continue
        function = _function(value)
        if function is not None:
            yield from _of_function(function, seen)
        elif isinstance(value, type):
            yield from _of_class(value, seen) if is_file_of_user(value.__module__) else ()
        elif isinstance(value, ModuleType):
            # Not those that these import, and so on: a repository may be large, and each batch reads what is found.
            if follows and is_file_of_user(value.__name__):
                seen.add_file(vars(value))
        else:
            exchange = partial(names.__setitem__, name)
            put = partial(_put_back, names, name, value, partial(exchange, value))
            yield Kept(f"{names.get('__name__', '')}.{name}", value, put, exchange, place=_place_in_file(names, name))
            if isinstance(value, partial) and isinstance(value.func, FunctionType):
                yield from _of_function(value.func, seen)


def _put_default(function: FunctionType, i: int, value: Any) -> None:
    before = function.__defaults__ or ()
    function.__defaults__ = (*before[:i], value, *before[i + 1 :])


def _nothing() -> None:
    """Leave a name as it is: what is behind it is put back by itself."""


def _function(value: Any) -> FunctionType | None:
    """Return the function behind a method, a property or a decorated one."""
    if isinstance(value, property):
        value = value.fget
    elif isinstance(value, (classmethod, staticmethod)):
        value = value.__func__
    return value if isinstance(value, FunctionType) else None


def _put_back(names: Any, name: str, value: Any, put: Callable[[], object]) -> None:
    """Put a plain number back under its name."""
    if type(value) in NUMBERS and names.get(name) is not value:
        put()


def _place_in_file(names: dict[str, Any], name: str) -> Place:
    return Place(
        (id(names), name),
        lambda: {name: names[name]} if name in names else {},
        names.update,
    )


def _contents_of_cell(cell: CellType) -> list[Any]:
    with suppress(ValueError):  # an empty one
        return [cell.cell_contents]
    return []


def _put_in_cell(cell: CellType, before: list[Any]) -> None:
    for value in before:
        cell.cell_contents = value


def _refill(cell: CellType, value: Any) -> None:
    if type(value) in NUMBERS and cell.cell_contents is not value:
        cell.cell_contents = value
