"""What a trainer's loops log into, of which one method is another one while a run is in progress."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from typing import Any, ClassVar

from lightning.pytorch import Trainer


class LoopResults(ABC):
    """The results of a trainer's loops; a class because what it replaces is put back.

    Attributes:
        method: the name of the one that is replaced.
    """

    method: ClassVar[str]

    def __init__(self) -> None:
        self._followed: list[Any] = []

    @abstractmethod
    def _instead(self, results: Any, *args: Any) -> Any:
        """Do what is done in the method's place, for a loop's results."""

    def follow(self, trainer: Trainer) -> None:
        """Replace the method of all loops of a trainer, until `release`."""
        self.release()
        fit = trainer.fit_loop.epoch_loop
        for loop in (fit, fit.val_loop, trainer.validate_loop, trainer.test_loop):
            self._followed.append(loop._results)
            vars(loop._results)[self.method] = partial(self._instead, loop._results)

    def release(self) -> None:
        """Give the loops their own method back."""
        for results in self._followed:
            vars(results).pop(self.method, None)
        self._followed.clear()
