"""`on_train_batch_end` and its kin, as their users wrote them for one device: what a step returned, and its batch, with whole sequences.

on_validation_batch_end(self, outputs, batch, batch_idx)       reads both: both are made whole first
on_train_batch_end(self, *_)                                   reads neither: nothing is gathered
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, NamedTuple

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden

HOOKS = ("on_train_batch_end", "on_validation_batch_end", "on_test_batch_end", "on_predict_batch_end")
_LIBRARIES = ("lightning", "pytorch_lightning", "lightning_sp")
_MISSING = object()


class BatchEnd(NamedTuple):
    """What such a hook is handed."""

    outputs: Any
    batch: Any


class WholeBatchEnds:
    """Users' hooks at a batch's end while a run is in progress; a class because what they are is put back.

    Args:
        whole: gives what was handed with whole sequences: `whole(handed, reads, hook)`, where `reads` says of outputs and batch which the hook
            reads. Every rank calls it.
    """

    def __init__(self, whole: Callable[[BatchEnd, tuple[bool, bool], str], BatchEnd]) -> None:
        self._whole = whole
        self._replaced: list[tuple[Any, str, Any]] = []
        self._reading: set[str] = set()  # hooks that read outputs

    def follow(self, trainer: Trainer) -> None:
        """Hand the hooks of a trainer's callbacks and module whole sequences until `release`."""
        self.release()
        for owner, hook, first in _hooks(trainer):
            own = getattr(owner, hook)
            reads = (_reads(own, first), _reads(own, first + 1))
            if reads[0]:
                self._reading.add(hook)
            if any(reads):
                self._replaced.append((owner, hook, vars(owner).get(hook, _MISSING)))
                object.__setattr__(owner, hook, self._handing(own, hook, reads, first))

    def release(self) -> None:
        """Give every owner its own hook back."""
        for owner, hook, before in self._replaced:
            if before is _MISSING:
                object.__delattr__(owner, hook)
            else:
                object.__setattr__(owner, hook, before)
        self._replaced.clear()
        self._reading.clear()

    def reads_outputs(self, step: str) -> bool:
        """Return whether a user's hook reads what a step of a name, `validation_step`, returns; the same on all ranks."""
        return f"on_{step.removesuffix('_step')}_batch_end" in self._reading

    def _handing(self, own: Callable[..., Any], hook: str, reads: tuple[bool, bool], first: int) -> Callable[..., Any]:
        @wraps(own)
        def handed(*args: Any, **kwargs: Any) -> Any:
            given = inspect.signature(own).bind_partial(*args, **kwargs)
            values = list(given.args)
            if len(values) > first + 1:
                values[first : first + 2] = self._whole(BatchEnd(*values[first : first + 2]), reads, hook)
            return own(*values, **given.kwargs)

        return handed


def _hooks(trainer: Trainer) -> Iterator[tuple[Any, str, int]]:
    """Yield the owner and name of each hook that a user wrote, and where in its call outputs stand."""
    module = trainer.lightning_module
    for hook in HOOKS:
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if _is_users(getattr(callback, hook)):
                yield callback, hook, 2
        if is_overridden(hook, module):
            yield module, hook, 0


def _is_users(hook: Any) -> bool:
    function = getattr(hook, "__func__", hook)
    return str(getattr(function, "__module__", "")).partition(".")[0] not in _LIBRARIES


def _reads(hook: Any, place: int) -> bool:
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
