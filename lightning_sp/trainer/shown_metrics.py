"""Metrics that the user's code reads of its trainer within a step: noted in a trial, and there where none has been logged yet.

    if self.trainer.callback_metrics.get("train_loss", 9) < 2: ...

Lightning and this package go on reading what was logged.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import Trainer
from torch import Tensor

from lightning_sp.trainer.shown_progress import is_of_user

_METRICS = ("callback_metrics", "logged_metrics", "progress_bar_metrics")


class ReadMetrics(dict[str, Any]):
    """A trainer's metrics that note which of them the user's code asks for; all of `shown` are there."""

    def __init__(self, metrics: Any, read: set[str], shown: dict[str, Tensor]) -> None:
        super().__init__({**metrics, **shown})
        self._read = read.add

    def __getitem__(self, name: str) -> Any:
        """Return a metric, noted."""
        self._read(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """Return a metric, noted."""
        self._read(name)
        return super().get(name, default)

    def __contains__(self, name: object) -> bool:
        """Return whether a metric is there; it is noted."""
        self._read(str(name))
        return super().__contains__(name)


@contextmanager
def noted_metrics(module: Any, shown: dict[str, Tensor] | None = None) -> Iterator[set[str]]:
    """Note which metrics of its trainer the user's code asks for.

    Args:
        module: of the run.
        shown: that are there, whatever was logged.

    Yields:
        Their names so far.
    """
    read: set[str] = set()
    own = {name: getattr(Trainer, name) for name in _METRICS}

    def noting(name: str) -> property:
        def metrics(trainer: Trainer) -> Any:
            found = own[name].fget(trainer)
            is_users = trainer is module._trainer and is_of_user(sys._getframe(1))
            return ReadMetrics(found, read, shown or {}) if is_users else found

        return property(metrics)

    try:
        for name in _METRICS:
            setattr(Trainer, name, noting(name))
        yield read
    finally:
        for name, each in own.items():
            setattr(Trainer, name, each)
