"""Numbers of the user's own that stay as they are for some batches and then change: an epoch, a mask's length, a phase that a callback sets.

    if self.current_epoch >= 5: labels[:, : self.skipped] = -100      no operation of the loss is new, and no step before did it

A trial of the step in which they change shows what the others could not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightning_sp.step.isolation import OF_THE_FRAMEWORK, is_class_of_user
from lightning_sp.trainer.hooks.batch_hooks import of_user

_KINDS = (bool, int, float, str, type(None))
_NOT_THE_USERS = {*OF_THE_FRAMEWORK, "_current_fx_name"}
# Of so many batches: what changes with each is a counter.
_STAYS = 2
# The first changes are each told; then the 8th, the 16th, the 32nd, and so on.
_EACH = 4


class Schedules:
    """What is known of such numbers in a fit; a class because it waits for their change."""

    def __init__(self) -> None:
        self._owners: list[Any] = []
        self._values: dict[tuple[int, str], tuple[Any, int]] = {}
        self._changes = 0

    def start(self, trainer: Any) -> None:
        """Begin a fit."""
        module = trainer.lightning_module
        owners = [*module.modules(), *of_user(trainer)]
        # FSDP2 gives a module a class of its own, behind which the user's stands.
        self._owners = [each for each in owners if any(map(is_class_of_user, type(each).__mro__))]
        self._values, self._changes = {}, 0

    def have_changed(self, trainer: Any) -> bool:
        """Return whether one has before this training batch, and is to be told; once for a batch."""
        if not trainer.training or not self._owners:
            return False
        values, changed = self._values, False
        for key, value in self._read(trainer):
            before, batches = values.get(key, (value, 0))
            same = type(before) is type(value) and (before == value or value != value)
            changed |= not same and batches >= _STAYS
            values[key] = (value, batches + 1 if same else 1)
        self._changes += changed
        return changed and (self._changes <= _EACH or self._changes & (self._changes - 1) == 0)

    def _read(self, trainer: Any) -> Iterator[tuple[tuple[int, str], Any]]:
        yield (-1, "epoch"), trainer.current_epoch
        for index, owner in enumerate(self._owners):
            for name, value in vars(owner).items():
                if type(value) in _KINDS and name not in _NOT_THE_USERS:
                    yield (index, name), value
