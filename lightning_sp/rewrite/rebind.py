"""Names that a model's files bound to a function by `from ... import ...`, and attributes of its modules: bound to another function.

Replacing an attribute of torch's module does not reach them. Searched: all loaded modules of the packages that the model's classes come from,
but torch's own, and the attributes of the model's modules. A compiled one counts too: `torch.compile(flex_attention)`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from types import ModuleType
from typing import Any

from torch import nn

# Of torch's modules the attribute itself is replaced; the others hold no models of users.
_NOT_SEARCHED = {"torch", "builtins", "abc", "typing", "lightning", "lightning_sp", "typing_extensions"}


def rebind(
    root: nn.Module,
    original: Callable[..., Any],
    make: Callable[[Callable[..., Any]], Callable[..., Any]],
    undo: ExitStack,
) -> None:
    """Bind each name of a model that is bound to a function to another one.

    Args:
        root: the model.
        original: the function, compiled or not.
        make: from what a name was bound to, the function or a compiled one, to what it is bound to.
        undo: takes that back.
    """
    packages = {each.__module__.partition(".")[0] for m in root.modules() for each in type(m).__mro__} - _NOT_SEARCHED
    loaded = [m for name, m in list(sys.modules.items()) if name.partition(".")[0] in packages]
    # Only a file's or an object's own names: asking a lazy module for one would load it.
    holders: list[dict[str, Any]] = [vars(module) for module in loaded if isinstance(module, ModuleType)]
    holders += [vars(module) for module in root.modules()]
    for holder in holders:
        for name, value in list(holder.items()):
            if _is(value, original):
                holder[name] = make(value)
                undo.callback(partial(holder.__setitem__, name, value))


def rebind_to(root: nn.Module, original: Callable[..., Any], own: Callable[..., Any], undo: ExitStack) -> None:
    """Bind each name of a model that is bound to a function, compiled or not, to another one; `undo` takes that back."""
    rebind(root, original, lambda _: own, undo)


def _is(value: Any, original: Callable[..., Any]) -> bool:
    if value is original:
        return True
    # What torch.compile returns for a function.
    return callable(value) and getattr(value, "__dict__", {}).get("_torchdynamo_orig_callable") is original
