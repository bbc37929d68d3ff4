"""`on_train_batch_end` and its kin, as their users wrote them for one device: what a step returned, and its batch, with whole sequences.

on_validation_batch_end(self, outputs, batch, batch_idx)       reads both: both are made whole first
on_train_batch_end(self, *_)                                   reads neither: nothing is gathered
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import BasePredictionWriter

from lightning_sp.trainer.hooks.replaced_hooks import ReplacedHooks, hooks_of_user, reads_argument

# By the step whose outputs they are handed.
STEPS = {"on_train_batch_end": "training_step"} | {
    f"on_{kind}_batch_end": f"{kind}_step" for kind in ("validation", "test", "predict")
}
HOOKS = tuple(STEPS)
# Where `write_on_batch_end` is handed the batch.
_WRITTEN = 4


class BatchEnd(NamedTuple):
    """What such a hook is handed."""

    outputs: Any
    batch: Any


class WholeBatchEnds:
    """Users' hooks at a batch's end while a run is in progress; a class because what they are is put back.

    Args:
        whole: gives what was handed with whole sequences: `whole(handed, reads, hook)`, where `reads` says of outputs and batch which the hook
            reads. Every rank calls it.
    """

    def __init__(self, whole: Callable[[BatchEnd, tuple[bool, bool], str], BatchEnd]) -> None:
        self._whole = whole
        self._replaced = ReplacedHooks()
        self._reading: set[str] = set()  # hooks that read outputs

    def follow(self, trainer: Trainer) -> None:
        """Hand the hooks of a trainer's callbacks and module whole sequences until `release`."""
        self.release()
        for owner, hook, first in hooks_of_user(trainer, HOOKS):
            own = getattr(owner, hook)
            reads = (reads_argument(own, first), reads_argument(own, first + 1))
            if reads[0]:
                self._reading.add(hook)
            if any(reads):
                self._replaced.replace(owner, hook, self._handing(own, hook, reads, first))
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            # Its hook is Lightning's own, and hands the batch on.
            if isinstance(callback, BasePredictionWriter) and reads_argument(callback.write_on_batch_end, _WRITTEN):
                self._replaced.replace(callback, "write_on_batch_end", self._writing(callback.write_on_batch_end))

    def release(self) -> None:
        """Give every owner its own hook back."""
        self._replaced.release()
        self._reading.clear()

    def reads_outputs(self, step: str) -> bool:
        """Return whether a user's hook reads what a step of a name, `validation_step`, returns; the same on all ranks."""
        return any(STEPS[hook] == step for hook in self._reading)

    def _writing(self, own: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(own)
        def written(*args: Any) -> Any:
            handed = self._whole(BatchEnd(None, args[_WRITTEN]), (False, True), "on_predict_batch_end")
            return own(*args[:_WRITTEN], handed.batch, *args[_WRITTEN + 1 :])

        return written

    def _handing(self, own: Callable[..., Any], hook: str, reads: tuple[bool, bool], first: int) -> Callable[..., Any]:
        @wraps(own)
        def handed(*args: Any, **kwargs: Any) -> Any:
            given = inspect.signature(own).bind_partial(*args, **kwargs)
            values = list(given.args)
            if len(values) > first + 1:
                values[first : first + 2] = self._whole(BatchEnd(*values[first : first + 2]), reads, hook)
            return own(*values, **given.kwargs)

        return handed
