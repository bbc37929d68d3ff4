"""Which attributes code between steps may read: names in Lightning's hooks of the user's module, and in the user's callbacks.

def on_train_batch_end(self, trainer, module, *_):
    self.seen.append(module.last_logits.mean())                     "last_logits"

def on_validation_end(self, trainer, module):
    upload(trainer.checkpoint_callback.best_model_path)             where a checkpoint is, while the fit goes on
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any

from lightning.pytorch import Trainer

from lightning_sp.trainer.hooks.batch_hooks import of_user

_LIBRARIES = ("lightning", "pytorch_lightning", "lightning_sp", "torch")
_PATHS = ("best_model_path", "last_model_path", "kth_best_model_path", "best_k_models")
_HOOKS = ("optimizer_step", "optimizer_zero_grad", "lr_scheduler_step", "configure_gradient_clipping")


def read_in_hooks(trainer: Trainer) -> frozenset[str]:
    """Return the names that hooks of the user's module and callbacks mention, and methods of theirs that they name."""
    seen: set[Any] = set()
    return frozenset(name for owner, hook in _hooks(trainer) for name in _mentioned(owner, _method(owner, hook), seen))


def reader_of_paths(trainer: Trainer) -> str:
    """Return the user's code that may read during a fit where its checkpoints are, with what it reads; empty where none does.

    That is a hook, or the `after_save_checkpoint` of a logger, with the user's methods and functions that it calls.
    """
    loggers = [(each, "after_save_checkpoint") for each in trainer.loggers]
    for owner, hook in [*_hooks(trainer), *loggers]:
        function = _method(owner, hook)
        others = getattr(function, "__globals__", {})
        if found := sorted(_mentioned(owner, function, set(), others).intersection(_PATHS)):
            return f"{type(owner).__name__}.{hook} reads {found[0]}"
    return ""


def _hooks(trainer: Trainer) -> Iterator[tuple[Any, str]]:
    """Yield hooks of Lightning's that code of the user's may be: owners and names."""
    module = trainer.lightning_module
    yield from ((module, name) for name in dir(type(module)) if name.startswith("on_") or name in _HOOKS)
    yield from ((each, name) for each in of_user(trainer) for name in dir(type(each)) if not name.startswith("__"))


def _method(owner: Any, name: str) -> Any:
    return inspect.unwrap(getattr(type(owner), name, None))  # type: ignore[arg-type]


def _mentioned(owner: Any, function: Any, seen: set[Any], others: Mapping[str, Any] | None = None) -> set[str]:
    """Return the names in the code of a user's method, and in that of what it calls.

    Args:
        owner: whose other methods it may call.
        function: the method; anything else has no names.
        seen: those that were searched.
        others: what functions of the user's it may call, too, by names.
    """
    library = str(getattr(function, "__module__", "")).partition(".")[0]
    if not inspect.isfunction(function) or function in seen or library in _LIBRARIES:
        return set()
    seen.add(function)
    found = set(_names(function.__code__))
    called = [_method(owner, name) for name in found]
    called += [each for name in found if isinstance(each := (others or {}).get(name), FunctionType)]
    return found.union(*(_mentioned(owner, each, seen, others) for each in called))


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _names(each)
        elif isinstance(each, str):  # getattr(module, "last_logits")
            yield each
