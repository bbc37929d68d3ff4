"""A module's `log` while a step runs: what is to see each call stands in its place, and what was there is put back."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningModule

_SIGNATURE = inspect.signature(LightningModule.log)


@contextmanager
def replaced_log(module: LightningModule, log: Callable[..., None]) -> Iterator[None]:
    """Let what a step logs come to `log`, of the arguments of `LightningModule.log`. It calls the one that it replaces itself."""
    before = vars(module).get("log")
    vars(module)["log"] = log
    try:
        yield
    finally:
        if before is None:
            vars(module).pop("log", None)
        else:
            vars(module)["log"] = before


def given_to_log(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return what a call of `log` was given, by the names of its parameters."""
    return _SIGNATURE.bind_partial(None, *args, **kwargs).arguments
