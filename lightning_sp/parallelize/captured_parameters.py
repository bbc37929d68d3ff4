"""Parameters that a user keeps from before they are sharded: `self.penalised = list(self.model.parameters())`, an optimizer made in `__init__`.

Sharding makes new parameters. The old ones would be read on, never trained, without a word: a run finds the new ones in their places, with
what the user has noted on the old ones (`weight._no_weight_decay = True`).

    looked at   attributes and hooks of modules, attributes of the Trainer's callbacks, names of their classes and files
    within      lists, tuples, deques, dicts and their keys, sets, objects and optimizers, what functions enclose and have as defaults
    found as    a parameter, a weak reference to one, its `id()`
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from functools import partial
from types import FunctionType, MethodType
from typing import Any
from weakref import ReferenceType, ref

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_sp.users_code.kept_outside import kept_outside

_LIBRARIES = (
    "torch",
    "lightning",
    "pytorch_lightning",
    "lightning_sp",
    "transformers",
    "peft",
    "builtins",
    "torchmetrics",
)
# Attributes of modules that hold nothing of the user's; hooks do.
_LEFT_OUT = frozenset({"_parameters", "_buffers", "_modules", "_trainer"})
_DEEPEST = 4
_NUMBERS = frozenset({bool, int, float, str, type(None)})


class CapturedParameters:
    """The parameters of a module as they are before they are sharded; a class because their places are looked for once they are.

    Args:
        root: the LightningModule.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        owners = [(module, name, each) for module in root.modules() for name, each in module._parameters.items()]
        # They are held, so that no other object has their number.
        self._owners = {id(each): (module, name, each) for module, name, each in owners if each is not None}
        self._seen: set[int] = set()

    def renew(self) -> None:
        """Put what the modules hold by now in the place of each."""
        for module, name, before in self._owners.values():
            if (now := module._parameters.get(name)) is not None and now is not before:
                vars(now).update(vars(before))
        for module in self._root.modules():
            self._renew_attributes(module, depth=0, left_out=_LEFT_OUT)
        callbacks = getattr(vars(self._root).get("_trainer"), "callbacks", ())
        for callback in callbacks:
            self._renew_attributes(callback, depth=0)
        for kept in kept_outside([*self._root.modules(), *callbacks]):
            if (renewed := self._renewed(kept.value, 0)) is not kept.value and kept.exchange is not None:
                kept.exchange(renewed)

    def _renew_attributes(self, holder: Any, *, depth: int, left_out: frozenset[str] = frozenset()) -> None:
        for name, value in _attributes(holder):
            if name not in left_out and (renewed := self._renewed(value, depth)) is not value:
                object.__setattr__(holder, name, renewed)

    def _now(self, number: int) -> nn.Parameter | None:
        """Return what stands for a parameter by now, by the number that it had."""
        module, name, _ = self._owners.get(number, (None, "", None))
        return None if module is None else module._parameters[name]

    def _renewed(self, value: Any, depth: int) -> Any:
        """Return what stands for a value by now: itself, changed in place, wherever that is possible."""
        if isinstance(value, nn.Parameter):
            now = self._now(id(value))
            return value if now is None else now
        if type(value) is int:
            now = self._now(value)
            return value if now is None else id(now)
        if type(value) is ReferenceType:
            now = self._now(id(value()))
            return value if now is None else ref(now, value.__callback__)
        if id(value) in self._seen or depth > _DEEPEST or isinstance(value, (nn.Module, type)):
            return value
        each: Callable[[Any], Any] = partial(self._renewed, depth=depth + 1)
        if isinstance(value, (tuple, frozenset)):
            parts = [each(part) for part in value]
            if all(new is old for new, old in zip(parts, value, strict=True)):
                return value
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        self._seen.add(id(value))
        if isinstance(value, list) and self._is_of_numbers(value):
            return value
        if not _renew_container(value, each) and not self._has_begun(value) and _is_looked_into(value):
            self._renew_attributes(value, depth=depth + 1)
        return value

    def _is_of_numbers(self, value: list[Any]) -> bool:
        """Return whether a list has numbers and texts alone, none of them a parameter's: the tokens of a data set, say, which are many."""
        return _NUMBERS.issuperset(map(type, value)) and self._owners.keys().isdisjoint(value)

    def _has_begun(self, value: Any) -> bool:
        """Return whether an optimizer has states of whole parameters: it has stepped them, and cannot go on with shards."""
        return isinstance(value, Optimizer) and any(id(each) in self._owners for each in value.state)


def _renew_container(value: Any, each: Callable[[Any], Any]) -> bool:
    """Renew what a container holds, in place; return whether the value is one.

    Args:
        value: of any class.
        each: gives what stands for a value by now.
    """
    if isinstance(value, (list, deque)):
        for place, old in enumerate(list(value)):
            if (new := each(old)) is not old:
                value[place] = new
    elif isinstance(value, dict):
        pairs = [(key, each(key) if isinstance(key, Hashable) else key, old, each(old)) for key, old in value.items()]
        if any(key is not new for key, new, _, _ in pairs):
            value.clear()  # so that their order stays
        for key, new_key, old, new in pairs:
            if key is not new_key or old is not new or new_key not in value:
                value[new_key] = new
    elif isinstance(value, set):
        parts = [(old, each(old)) for old in value]
        if any(new is not old for old, new in parts):
            value.clear()
            value.update(new for _, new in parts)
    elif isinstance(value, FunctionType):
        for cell in value.__closure__ or ():
            try:
                old = cell.cell_contents
            except ValueError:  # a name that has no value yet
                continue
            if (new := each(old)) is not old:
                cell.cell_contents = new
        if (defaults := each(value.__defaults__)) is not value.__defaults__:
            value.__defaults__ = defaults
        each(value.__kwdefaults__)
    elif isinstance(value, partial):
        state = value.func, value.args, value.keywords
        if (new := each(state)) is not state:
            value.__setstate__((*new, vars(value)))  # type: ignore[attr-defined]
    elif isinstance(value, MethodType):
        each(value.__self__)
    else:
        return False
    return True


def _is_looked_into(value: Any) -> bool:
    """Return whether an object's attributes are the user's to fill."""
    if isinstance(value, (Optimizer, LRScheduler)):
        return True
    return type(value).__module__.partition(".")[0] not in _LIBRARIES


def _attributes(holder: Any) -> list[tuple[str, Any]]:
    """Return the attributes of an object, those of `__slots__` too."""
    slots = [vars(kind).get("__slots__", ()) for kind in type(holder).__mro__]
    names = [name for each in slots for name in ([each] if isinstance(each, str) else each) if hasattr(holder, name)]
    return [*getattr(holder, "__dict__", {}).items(), *((name, getattr(holder, name)) for name in names)]
