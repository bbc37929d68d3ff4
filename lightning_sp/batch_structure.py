"""A batch's structure: its entries by name, and the same structure with other values.

    {"input_ids": x, "labels": y}, a BatchEncoding, a dataclass, a NamedTuple, an object with tensors       input_ids, labels
    (x, y), [x, y]                                                                                          0, 1
    {"inputs": {"input_ids": x}, "labels": y}, ({"input_ids": x}, y)           input_ids, labels;  input_ids, 1
    {"chosen": {"input_ids": x}, "rejected": {"input_ids": y}}                 chosen.input_ids, rejected.input_ids

What is nested has its own name. Where two have one name, and within lists, each has its path.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor, nn

_Path = tuple[str, ...]
# Deeper than any batch; what refers to itself ends there.
_DEEPEST = 8


def entries_of(batch: Any) -> dict[str, Any] | None:
    """Return a batch's entries by name, those of batches within it too; None where it is no structure of any."""
    if isinstance(batch, Tensor):
        return {"input_ids": batch}
    parts = _parts(batch)
    if parts is None or (not _is_container(batch) and not holds_tensors(batch)):
        return None
    leaves = [leaf for name, value in parts for leaf in _leaves(value, (name,))]
    return dict(zip(_names([path for path, _ in leaves]), (value for _, value in leaves), strict=True))


def with_entries(batch: Any, entries: Mapping[str, Any]) -> Any:
    """Return a structure of a batch's classes with other values.

    Args:
        batch: whose structure it is; nothing of it is changed.
        entries: by the names of `entries_of`. Others are added where the batch is a mapping, and left out elsewhere; those that are missing
            are taken out of a mapping.
    """
    if isinstance(batch, Tensor):
        return entries["input_ids"]
    paths = [path for name, value in _parts(batch) or () for path, _ in _leaves(value, (name,))]
    names = _names(paths)
    values = {path: entries[name] for path, name in zip(paths, names, strict=True) if name in entries}
    added = {name: value for name, value in entries.items() if name not in names} if _is_mapping(batch) else {}
    return _closed(batch, (), values, added)


def is_plain_dict(batch: Any) -> bool:
    """Return whether a batch is a dict as a collate function gives it, and not of a class of its user's."""
    return type(batch) is dict or (isinstance(batch, dict) and type(batch).__module__.startswith("lightning_sp."))


def holds_tensors(value: Any) -> bool:
    """Return whether a value is a tensor, or a collection that holds one at any depth."""
    return any(isinstance(each, Tensor) for _, each in _leaves(value, ()))


def _is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping)


def _is_container(value: Any) -> bool:
    return isinstance(value, (Mapping, tuple, list)) or (is_dataclass(value) and not isinstance(value, type))


def _parts(value: Any) -> list[tuple[str, Any]] | None:
    """Return what a value is made of, by name; None where it is one thing."""
    if isinstance(value, Mapping):
        return [(str(name), each) for name, each in value.items()]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(zip(value._fields, value, strict=True))
    if isinstance(value, (tuple, list)):
        return [(str(index), each) for index, each in enumerate(value)]
    if isinstance(value, (Tensor, nn.Module, type)):
        return None
    names = _attributes(value)
    return [(name, getattr(value, name)) for name in names] if names else None


def _attributes(value: Any) -> list[str]:
    """Return the attributes of a dataclass' or another object; empty where it has none."""
    names = [each.name for each in fields(value)] if is_dataclass(value) else []
    slots = [name for each in type(value).__mro__ for name in _listed(vars(each).get("__slots__", ()))]
    found = [*names, *getattr(value, "__dict__", ()), *slots]
    return [name for name in dict.fromkeys(found) if not name.startswith("__") and hasattr(value, name)]


def _listed(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _leaves(value: Any, path: _Path) -> Iterator[tuple[_Path, Any]]:
    """Yield what a value holds, each with the way to it: what holds no tensor is one thing."""
    parts = _opened(value, len(path))
    if parts is None:
        yield path, value
    for name, each in parts or ():
        yield from _leaves(each, (*path, name))


def _opened(value: Any, depth: int) -> list[tuple[str, Any]] | None:
    """Return the parts of what stands within a batch, if one of them is or holds a tensor."""
    if isinstance(value, Tensor) or depth > _DEEPEST or isinstance(value, (str, bytes, int, float, type(None))):
        return None
    parts = _parts(value)
    if parts is None or not any(
        isinstance(each, Tensor) or (_is_container(each) and _opened(each, depth + 1) is not None) for _, each in parts
    ):
        return None
    return parts


def _names(paths: list[_Path]) -> list[str]:
    """Return a name for each path: its last part, unless that is another's name, or the way leads through a list, which has any length."""
    short = Counter(path[-1] for path in paths)
    listed = [any(part.isdigit() for part in path[1:]) for path in paths]
    return [
        path[-1] if len(path) == 1 or (short[path[-1]] == 1 and not in_list) else ".".join(path)
        for path, in_list in zip(paths, listed, strict=True)
    ]


def _closed(value: Any, path: _Path, values: Mapping[_Path, Any], added: Mapping[str, Any]) -> Any:
    """Return a value's structure with other values, in new objects of the same classes."""
    parts = _opened(value, len(path)) if path else _parts(value)
    if parts is None:
        return values.get(path, value)
    new: dict[Any, Any] = {}
    keys = list(value) if _is_mapping(value) else [name for name, _ in parts]
    for key, (name, each) in zip(keys, parts, strict=True):
        below = (*path, name)
        if below in values or _opened(each, len(below)) is not None:
            new[key] = _closed(each, below, values, {})
    if _is_mapping(value):
        return mapping_like(value, {**new, **added})
    if isinstance(value, (tuple, list)):
        return type(value)(*new.values()) if hasattr(value, "_fields") else type(value)(new.values())
    made = copy(value)
    for name, each in new.items():
        object.__setattr__(made, name, each)  # a frozen dataclass has no other way
    return made


def _copied(mapping: Any) -> Any:
    try:
        return copy(mapping)
    except KeyError:
        # Python 3.10 asks for __getstate__, and a `__getattr__` that looks among the entries raises this where there is none.
        if not isinstance(mapping, dict):
            raise
        made = type(mapping).__new__(type(mapping))
        dict.update(made, mapping)
        vars(made).update(vars(mapping))
        return made


def mapping_like(mapping: Any, items: dict[Any, Any]) -> Any:
    """Return a mapping of the same class with other items."""
    if is_plain_dict(mapping):
        return items
    made = _copied(mapping)
    for key in [key for key in made if key not in items]:
        del made[key]
    for key, each in items.items():
        made[key] = each
    return made
