"""Collectives that a read of a sharded tensor takes behind a run: watched as a run is, so that a rank that does not come is named.

if trainer.is_global_zero: print(model.head.weight.norm())      the other ranks have come to the end of their script
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from lightning_sp import comm

T = TypeVar("T")

# The latest strategy's; it may be gone, and its ranks' world with it.
_WATCHED_BY: list[weakref.WeakMethod[Callable[[Callable[[], Any]], Any]]] = []


def watch_behind_runs(together: Callable[[Callable[[], Any]], Any]) -> None:
    """Have what is read behind runs watched.

    Args:
        together: a method that runs a function that all ranks call, and watches it.
    """
    _WATCHED_BY[:] = [weakref.WeakMethod(together)]


def together(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Call a function that communicates, watched in a run or behind it. Every rank must call it."""
    call = _WATCHED_BY[0]() if _WATCHED_BY and not comm.is_watched() else None
    if call is None:
        return function(*args, **kwargs)
    found: T = call(partial(function, *args, **kwargs))
    return found
