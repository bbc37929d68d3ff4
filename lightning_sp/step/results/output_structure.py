"""What a step returns or keeps, as its leaves with the way to each, and the same with other leaves in the places of these.

{"a": [x, y]}      ("a", 0) x      ("a", 1) y

Opened are mappings, lists, tuples, sets, dataclasses and objects of the user's own. Anything else is a leaf.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, NamedTuple

from torch import Tensor, nn
from torchmetrics import Metric

from lightning_sp.batch_structure import mapping_like
from lightning_sp.users_code.ownership import is_object_of_user, key_text

Path = tuple[Any, ...]
Kinds = frozenset[tuple[Path, str]]
# Deeper than any output; what refers to itself ends there.
_DEEPEST = 8
_KEYS = (str, int, float, bytes, tuple, frozenset, type(None))
_CLOSED = (Tensor, nn.Module, Metric, Enum, type, BaseException)


class Leaf(NamedTuple):
    """What is no structure of anything, and the keys, numbers and names of attributes that lead to it."""

    path: Path
    value: Any


def leaves_of(value: Any, path: Path = ()) -> Iterator[Leaf]:
    """Yield the leaves of an output, in order."""
    parts = _parts(value, len(path))
    if parts is None:
        yield Leaf(path, value)
    for key, each in parts or ():
        yield from leaves_of(each, (*path, key))


def tensors_of(value: Any) -> list[Leaf]:
    """Return the tensors of an output, in order."""
    return [each for each in leaves_of(value) if isinstance(each.value, Tensor)]


def shapes_of(leaves: Iterable[Leaf]) -> dict[Path, tuple[int, ...]]:
    """Return the shapes of the tensors among leaves, by the way to each."""
    return {each.path: tuple(each.value.shape) for each in leaves if isinstance(each.value, Tensor)}


def kinds_of(value: Any) -> Kinds:
    """Return of what an output is made: the way to each leaf, "*" for any number in it, and the name of the leaf's class."""
    return frozenset((_any_number(each.path), type(each.value).__name__) for each in leaves_of(value))


def _any_number(path: Path) -> Path:
    keys = (part for key in path for part in (key if isinstance(key, tuple) else (key,)))
    return tuple("*" if isinstance(key, int) else key for key in keys)


def with_tensors(value: Any, change: Callable[[Tensor], Any], path: Path = ()) -> Any:
    """Return an output with other tensors, in new objects of the same classes where one has changed.

    Args:
        value: the output; nothing of it is written to.
        change: gives one for each tensor, in the order of `tensors_of`.
        path: that leads to it.
    """
    parts = _parts(value, len(path))
    if parts is None:
        return change(value) if isinstance(value, Tensor) else value
    new = [with_tensors(each, change, (*path, key)) for key, each in parts]
    if all(own is each for own, (_, each) in zip(new, parts, strict=True)):
        return value
    if isinstance(value, Mapping):
        return mapping_like(value, dict(zip(value, new, strict=True)))
    if isinstance(value, deque):
        return type(value)(new, value.maxlen)
    if isinstance(value, (list, tuple, set, frozenset)):
        return type(value)(*new) if hasattr(value, "_fields") else type(value)(new)
    made = copy(value)
    for (name, _), each in zip(parts, new, strict=True):
        object.__setattr__(made, name, each)  # a frozen dataclass has no other way
    return made


def _parts(value: Any, depth: int) -> list[tuple[Any, Any]] | None:
    """Return what a value is made of, by key; None where it is a leaf."""
    if depth > _DEEPEST or isinstance(value, _CLOSED):
        return None
    if isinstance(value, Mapping):
        return [(key if isinstance(key, _KEYS) else key_text(key), each) for key, each in value.items()]
    if isinstance(value, (list, tuple, deque)):
        return list(enumerate(value))
    if isinstance(value, (set, frozenset)):
        return list(enumerate(sorted(value, key=repr)))
    if is_dataclass(value) or is_object_of_user(value):
        names = [each.name for each in fields(value)] if is_dataclass(value) else []
        found = dict.fromkeys([*names, *getattr(value, "__dict__", ()), *_slots(type(value))])
        return [(name, getattr(value, name)) for name in found if hasattr(value, name)]
    return None


def _slots(kind: type) -> list[str]:
    """Return the names of an object's attributes that are in no dict."""
    found = (vars(each).get("__slots__", ()) for each in kind.__mro__)
    names = [name for each in found for name in ((each,) if isinstance(each, str) else each)]
    return [name for name in names if not name.startswith("__")]
