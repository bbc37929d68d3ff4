"""Which attributes code between steps may read: names in Lightning's hooks of the user's module, and in the user's callbacks.

def on_train_batch_end(self, trainer, module, *_):
    self.seen.append(module.last_logits.mean())         "last_logits"
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import CodeType
from typing import Any

from lightning.pytorch import Trainer

from lightning_sp.trainer.hooks.batch_hooks import of_user

_LIBRARIES = ("lightning", "pytorch_lightning", "lightning_sp", "torch")
_HOOKS = ("optimizer_step", "optimizer_zero_grad", "lr_scheduler_step", "configure_gradient_clipping")


def read_in_hooks(trainer: Trainer) -> frozenset[str]:
    """Return the names that hooks of the user's module and callbacks mention, and methods of theirs that they name."""
    module = trainer.lightning_module
    hooks = [(module, name) for name in dir(type(module)) if name.startswith("on_") or name in _HOOKS]
    hooks += [(each, name) for each in of_user(trainer) for name in dir(type(each)) if not name.startswith("__")]
    seen: set[Any] = set()
    return frozenset(name for hook in hooks for name in _mentioned(*hook, seen))


def _mentioned(owner: Any, name: str, seen: set[Any]) -> set[str]:
    """Return the names in the code of a method of the user's, and in that of other methods of its owner that it names."""
    function = inspect.unwrap(getattr(type(owner), name, None))  # type: ignore[arg-type]
    library = str(getattr(function, "__module__", "")).partition(".")[0]
    if not inspect.isfunction(function) or function in seen or library in _LIBRARIES:
        return set()
    seen.add(function)
    found = set(_names(function.__code__))
    return found.union(*(_mentioned(owner, other, seen) for other in found))


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _names(each)
        elif isinstance(each, str):  # getattr(module, "last_logits")
            yield each
