"""Hooks of Lightning's that a user wrote: which they are, what they read, and others in their place while a run is in progress."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden

_LIBRARIES = ("lightning", "pytorch_lightning", "lightning_sp")
_MISSING = object()


class ReplacedHooks:
    """Hooks that stand in the place of their owners'; a class because what they are is put back."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any]] = []

    def replace(self, owner: Any, hook: str, other: Callable[..., Any]) -> None:
        """Let an owner have another hook until `release`."""
        self._replaced.append((owner, hook, vars(owner).get(hook, _MISSING)))
        object.__setattr__(owner, hook, other)

    def release(self) -> None:
        """Give every owner its own hook back."""
        for owner, hook, before in reversed(self._replaced):
            if before is _MISSING:
                object.__delattr__(owner, hook)
            else:
                object.__setattr__(owner, hook, before)
        self._replaced.clear()


def hooks_of_user(trainer: Trainer, names: Sequence[str]) -> Iterator[tuple[Any, str, int]]:
    """Yield the owner and name of each hook that a user wrote, and where in its call what Lightning hands over begins."""
    module = trainer.lightning_module
    for hook in names:
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if _is_users(getattr(callback, hook)):
                yield callback, hook, 2
        if is_overridden(hook, module):
            yield module, hook, 0


def _is_users(hook: Any) -> bool:
    function = getattr(hook, "__func__", hook)
    return str(getattr(function, "__module__", "")).partition(".")[0] not in _LIBRARIES


def reads_argument(hook: Any, place: int) -> bool:
    """Return whether a hook's code reads the argument at a place; True where that cannot be seen."""
    function = inspect.unwrap(getattr(hook, "__func__", hook))
    code = getattr(function, "__code__", None)
    if code is None:
        return True
    place += function is not hook  # itself, of a method
    if place < code.co_argcount:
        name = code.co_varnames[place]
    elif code.co_flags & inspect.CO_VARARGS:
        name = code.co_varnames[code.co_argcount + code.co_kwonlyargcount]
    else:
        return True
    if name in code.co_cellvars:
        return True
    return any(
        name == each or (isinstance(each, tuple) and name in each)
        for each in (i.argval for i in dis.get_instructions(code))
    )
