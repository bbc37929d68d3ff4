"""Modules that attend to tokens which are not the sequence's: while one of them runs, no step is in progress."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import nn


class UnshardedModules:
    """What the preflight found of a model's attention; a class because hooks on the model's modules follow it.

    Args:
        context: a `SequenceContext`.
    """

    def __init__(self, context: Any) -> None:
        self._context = context
        self._undo = ExitStack()
        self._suspended: list[Any] = []
        self.known = False
        self.found_any = False

    @property
    def suspended_step(self) -> Any:
        """The step in which one of these modules runs; None while none does."""
        return self._suspended[0] if self._suspended else None

    def set(self, modules: Sequence[nn.Module] | None) -> None:
        """Let these modules, and what they hold, run whole on every rank; None where nothing is known of the model."""
        self._undo.close()
        self.known, self.found_any = modules is not None, bool(modules)
        # What they hold, too: a checkpointed block is recomputed by itself.
        for module in {each for root in modules or () for each in root.modules()}:
            self._undo.callback(module.register_forward_pre_hook(self._enter, prepend=True).remove)
            self._undo.callback(module.register_forward_hook(self._leave, always_call=True).remove)
            self._suspend_recomputation(module)

    def _suspend_recomputation(self, module: nn.Module) -> None:
        """A checkpointed block calls its own forward again in the backward, and not its hooks."""
        checkpointed = vars(module).get("forward")
        if not isinstance(checkpointed, partial) or not checkpointed.args:
            return
        forward, *others = checkpointed.args

        def suspended(*args: Any, **kwargs: Any) -> Any:
            self._enter()
            try:
                return forward(*args, **kwargs)
            finally:
                self._leave()

        module.forward = partial(checkpointed.func, suspended, *others, **checkpointed.keywords)
        self._undo.callback(setattr, module, "forward", checkpointed)

    def _enter(self, *_: Any) -> None:
        self._suspended.append(self._context.step)
        self._context.step = None

    def _leave(self, *_: Any) -> None:
        self._context.step = self._suspended.pop()
