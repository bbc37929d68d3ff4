"""What objects, dicts, lists and sets hold, and how it is put back: by Python's own methods, for those of a class may refuse, or count."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from functools import cache, partial
from types import MemberDescriptorType, MethodType
from typing import Any, NamedTuple

from torch import nn

from lightning_sp.users_code.ownership import OF_THE_FRAMEWORK, is_class_of_user, is_kind_of_user


class Place(NamedTuple):
    """Where values are kept under names or numbers.

    Args:
        holder: the object, dict, list, set, tuple, class or closure.
        read: returns what it holds now, in a dict, list or set of its own.
        put: puts that back; None where it holds the same for good.
    """

    holder: Any
    read: Callable[[], Any]
    put: Callable[[Any], object] | None


def places_of(value: Any) -> list[Place]:
    """Return where a value keeps others: attributes of a module or another object of the user's, contents of a dict, list, set or tuple."""
    kind: type = type(value)
    return [make(value) for make in _makers(kind)]


@cache
def _makers(kind: type) -> tuple[Callable[[Any], Place], ...]:
    if issubclass(kind, tuple):
        return (lambda value: Place(value, partial(list, value), None),)
    if issubclass(kind, partial):
        return (lambda value: Place(value, lambda: [*value.args, *value.keywords.values()], None),)
    if issubclass(kind, MethodType):
        return (lambda value: Place(value, lambda: [value.__self__], None),)
    found: list[Callable[[Any], Place]] = []
    if issubclass(kind, dict):
        own = OrderedDict if issubclass(kind, OrderedDict) else dict
        found.append(lambda value: Place(value, lambda: dict(own.items(value)), partial(put_items, value)))
    elif issubclass(kind, (list, deque)):
        found.append(lambda value: Place(value, partial(list, value), partial(put_elements, value)))
    elif issubclass(kind, set):
        found.append(lambda value: Place(value, partial(set, value), partial(put_members, value)))
    elif not issubclass(kind, nn.Module) and not is_kind_of_user(kind):
        return ()
    if kind.__dictoffset__:
        found.append(lambda value: _attributes_of(value, value.__dict__))
    if names := slots_of(kind):
        found.append(lambda value: Place(value, partial(_slots, value, names), partial(_put_slots, value, names)))
    return tuple(found)


def _attributes_of(value: Any, attributes: dict[str, Any]) -> Place:
    return Place(value, partial(_own_attributes, attributes), partial(put_attributes, attributes))


def _own_attributes(attributes: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if name not in OF_THE_FRAMEWORK}


def _slots(value: Any, names: list[str]) -> dict[str, Any]:
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def _put_slots(value: Any, names: list[str], before: dict[str, Any]) -> None:
    # Past what a class makes of it: one may be frozen, or check.
    for name in names:
        if name in before:
            object.__setattr__(value, name, before[name])
        elif hasattr(value, name):
            object.__delattr__(value, name)


def members_of(modules: list[nn.Module]) -> Place:
    """Return which parameters and modules modules have, not what they are: FSDP2 exchanges its parameters."""
    members = [each for module in modules for each in (module._modules, module._parameters)]
    before = [name for each in members for name in each]
    had = [set(each) for each in members]
    removed: list[dict[str, Any]] = [{} for _ in members]

    def put(names: list[str]) -> None:
        for each, old, stash in zip(members, had, removed, strict=True):
            if names == before:
                stash.update({name: each.pop(name) for name in [*each] if name not in old})
            else:
                each.update(stash)

    return Place(members, lambda: [name for each in members for name in each], put)


def slots_of(kind: type) -> list[str]:
    """Return the names of attributes that are in no dict, where the class is the user's: none of a class in C, which are read."""
    kinds = [each for each in kind.__mro__ if "__slots__" in vars(each) and is_class_of_user(each)]
    return [name for each in kinds for name, value in vars(each).items() if isinstance(value, MemberDescriptorType)]


def put_attributes(attributes: dict[str, Any], before: dict[str, Any]) -> None:
    """Put an object's attributes back, those of the user's."""
    for name in [n for n in attributes if n not in before and n not in OF_THE_FRAMEWORK]:
        del attributes[name]
    attributes.update(before)


def put_items(value: dict[Any, Any], before: dict[Any, Any]) -> None:
    """Put a dict's items back, in their order. Those of a class may refuse them, as a frozen configuration does."""
    kind = kind_of_dict(value)
    if [*map(id, kind.keys(value)), *map(id, kind.values(value))] != [*map(id, before), *map(id, before.values())]:
        kind.clear(value)
        for key, each in before.items():
            kind.__setitem__(value, key, each)


def kind_of_dict(value: dict[Any, Any]) -> type[dict[Any, Any]]:
    """Return the class of Python's whose methods a dict's are."""
    return OrderedDict if isinstance(value, OrderedDict) else dict


def put_members(value: set[Any], before: set[Any]) -> None:
    """Put a set's members back."""
    set.clear(value)
    set.update(value, before)


def put_elements(value: list[Any] | deque[Any], before: list[Any]) -> None:
    """Put the elements of a list or deque back."""
    kind: Any = list if isinstance(value, list) else deque
    kind.clear(value)
    kind.extend(value, before)
