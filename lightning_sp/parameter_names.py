"""The names of parameters and buffers as their user knows them, whatever wraps the modules: compilation, checkpointing, FSDP."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

from lightning_sp.errors import SequenceParallelError

T = TypeVar("T")

# What torch's wrapper modules call the module inside them. DistributedDataParallel's "module" is no such name: users have it too.
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
# Of the names in a message.
_SHOWN = 3


def user_name(name: str) -> str:
    """Return a parameter's name without those of the wrappers around its modules."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def by_user_name(values: Mapping[str, T]) -> dict[str, T]:
    """Return the same values by the user's names.

    Raises:
        SequenceParallelError: two names become one.
    """
    named: dict[str, T] = {}
    for name, value in values.items():
        own = user_name(name)
        if own in named:
            raise SequenceParallelError(
                f"{name!r} and another entry are both {own!r} without the names of wrappers ({', '.join(sorted(_WRAPPERS))}): which of them "
                "is meant is not known; keep one"
            )
        named[own] = value
    return named


def shown(names: Iterable[str], separator: str = ", ") -> str:
    """Return the first few names, for a message."""
    names = list(names)
    return separator.join(names[:_SHOWN]) + (f"{separator}..." if len(names) > _SHOWN else "")
