"""Hooks that a user's step puts on tensors of a part: what they see of a gradient is not one device's, and a line says so."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_sp.preflight.recording.hidden_terms import Call, users_place

# Of FSDP2's and this package's own.
_OWN = ("torch.", "lightning_sp.")


class _TensorHooks(TorchFunctionMode):
    """Notes the lines that put a hook on what a step has computed."""

    def __init__(self, lines: dict[str, None]) -> None:
        super().__init__()
        self._lines = lines

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is Tensor.register_hook and args[0].dim() > 1 and args[0].grad_fn is not None:
            hook = args[1] if len(args) > 1 else (kwargs or {}).get("hook")
            place = users_place(sys._getframe(1))
            if place is not None and not (getattr(hook, "__module__", None) or "").startswith(_OWN):
                self._lines[Call(*place, "register_hook", 0).describe()] = None
        return function(*args, **kwargs or {})


@contextmanager
def tensor_hooks_told(size: int, lines: dict[str, None]) -> Iterator[None]:
    """Warn of hooks on tensors that hold this rank's part of the tokens, once a line.

    Args:
        size: ranks of a sequence.
        lines: takes these lines.
    """
    with _TensorHooks(lines):
        yield
    for line in lines:
        _say_once(
            f"a hook of a tensor in {line} has the gradient of this rank's part of the tokens, which is {size} times as large, for the ranks' "
            f"are averaged: what it keeps of it is not one device's. self.trainer.strategy.unshard(gradient) / {size} in the hook, on every "
            "rank, is the whole (rows, tokens, ...) of its rows"
        )


@lru_cache
def _say_once(text: str) -> None:
    rank_zero_warn(text)
