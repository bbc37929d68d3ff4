"""`on_train_batch_start` and its kin, and `on_before_batch_transfer`, as their users wrote them for one device.

on_train_batch_start(self, batch, batch_idx)       reads the batch: it has it whole, and what it changes is split anew
on_before_batch_transfer(self, batch, loader_idx)  has it whole by itself; what both draw the ranks of a sequence draw alike
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_sp.trainer.hooks.replaced_hooks import ReplacedHooks, hooks_of_user, reads_argument

HOOKS = ("on_train_batch_start", "on_validation_batch_start", "on_test_batch_start", "on_predict_batch_start")
_BEFORE_TRANSFER = "on_before_batch_transfer"
# What runs a hook on a batch: `hands(own, batch, hook, number)`, where `own` takes the batch alone. Every rank calls it.
Hands = Callable[[Callable[[Any], Any], Any, str, int], Any]


class WholeBatchStarts:
    """Users' hooks before a step while a run is in progress; a class because what they are is put back.

    Args:
        starts: runs those at a batch's start that read it.
        transfers: runs those before a batch is split.
    """

    def __init__(self, starts: Hands, transfers: Hands) -> None:
        self._starts, self._transfers = starts, transfers
        self._replaced = ReplacedHooks()

    def follow(self, trainer: Trainer) -> None:
        """Run the hooks of a trainer's callbacks, module and datamodule so until `release`."""
        self.release()
        for number, (owner, hook, first) in enumerate(hooks_of_user(trainer, HOOKS)):
            own = getattr(owner, hook)
            if reads_argument(own, first):
                self._replaced.replace(owner, hook, _handing(own, hook, first, self._starts, number))
        for number, owner in enumerate((trainer.lightning_module, getattr(trainer, "datamodule", None))):
            if owner is not None and is_overridden(_BEFORE_TRANSFER, owner):
                own = getattr(owner, _BEFORE_TRANSFER)
                self._replaced.replace(
                    owner, _BEFORE_TRANSFER, _handing(own, _BEFORE_TRANSFER, 0, self._transfers, number)
                )

    def release(self) -> None:
        """Give every owner its own hook back."""
        self._replaced.release()


def _handing(own: Callable[..., Any], hook: str, first: int, hands: Hands, number: int) -> Callable[..., Any]:
    @wraps(own)
    def handed(*args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(own).bind_partial(*args, **kwargs)
        before, after = given.args[:first], given.args[first + 1 :]
        if len(given.args) <= first:
            return own(*args, **kwargs)
        return hands(lambda batch: own(*before, batch, *after, **given.kwargs), given.args[first], hook, number)

    return handed
