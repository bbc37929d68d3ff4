"""What a step reads of a run's progress, `global_step`, `current_epoch`, `is_last_batch`: noted in a trial, and shown as later in the run.

    if self.global_step >= 1_000: labels[:, : self.skipped] = -100      a trial of step 0 does not see this line
    if (self.global_step + 1) % 16 == 0: loss = loss + penalty(x)       nor a trial of some steps this one

Lightning and this package go on reading what is true.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple

from lightning.pytorch import LightningModule, Trainer

_LIBRARIES = ("lightning", "pytorch_lightning", "lightning_sp", "torch", "torchmetrics")
# Of a run: what begins is still there at half of it, or at its end.
_PARTS = (0.1, 0.5, 1.0)
# Of a run that says no end.
_STEPS, _EPOCHS = 10_000, 100
# Of the remainders that a step takes.
_MOST_REMAINDERS = 8


class Moment(NamedTuple):
    """A moment of a run.

    Args:
        step: its optimizer steps so far.
        epoch: its epochs so far.
        is_last_batch: whether its batch is an epoch's last one; None for what is true now.
    """

    step: int
    epoch: int
    is_last_batch: bool | None = None

    def describe(self) -> str:
        """Return it in words."""
        return f"as at optimizer step {self.step:,} in epoch {self.epoch}"


class Remainder(NamedTuple):
    """A remainder that a step takes of the run's progress, `(self.global_step + offset) % divisor`."""

    name: str
    offset: int
    divisor: int

    def at(self, step: int, epoch: int) -> int:
        """Return what it is at a moment."""
        return ((step if self.name == "global_step" else epoch) + self.offset) % self.divisor


class _Number(int):
    """A step's or an epoch's number that notes the remainders taken of it; copied and saved it is a plain one."""

    note: Any

    def __add__(self, other: Any) -> Any:
        return self._noting(int.__add__(self, other))

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return self._noting(int.__sub__(self, other))

    def __mod__(self, divisor: Any) -> Any:
        if isinstance(divisor, int) and divisor > 1:
            self.note(int(self), int(divisor))
        return int.__mod__(self, divisor)

    def __reduce__(self) -> Any:
        return int, (int(self),)

    def _noting(self, value: Any) -> Any:
        return value if value is NotImplemented else _noting_number(value, self.note)


def _noting_number(value: int, note: Any) -> _Number:
    number = _Number(value)
    number.note = note
    return number


def later_moments(trainer: Any) -> list[Moment]:
    """Return some moments of a fit that are still to come, its last step among them. Equal on all ranks."""
    of_epoch, epochs, end = _extent(trainer)
    found = []
    for part in _PARTS:
        step = min(math.floor(part * end), end - 1)
        epoch = step // of_epoch if of_epoch else min(math.floor(part * _EPOCHS), (epochs or _EPOCHS) - 1)
        found.append(Moment(step, max(epoch, trainer.current_epoch), True if step == end - 1 else None))
    return [each for each in dict.fromkeys(found) if each.step > trainer.global_step]


def remainder_moments(trainer: Any, remainders: set[Remainder], known: Sequence[Moment]) -> list[Moment]:
    """Return moments still to come at which remainders are 0, or as large as may be, if none shows that. Equal on all ranks.

    Args:
        trainer: of the run.
        remainders: that any rank's step takes.
        known: moments that are shown beside them.
    """
    of_epoch, epochs, end = _extent(trainer)
    now = Moment(trainer.global_step, trainer.current_epoch)
    found = [now, *known]
    for each in sorted(remainders)[:_MOST_REMAINDERS]:
        for wanted in (0, each.divisor - 1):
            if any(each.at(moment.step, moment.epoch) == wanted for moment in found):
                continue
            ahead = (wanted - each.at(now.step, now.epoch)) % each.divisor
            if each.name == "global_step":
                step = now.step + ahead
                epoch = max(step // of_epoch, now.epoch) if of_epoch else now.epoch
            else:
                epoch = now.epoch + ahead
                step = max(epoch * of_epoch, now.step)
            if step < end and (epochs is None or epoch < epochs):
                found.append(Moment(step, epoch))
    return found[1 + len(known) :]


def _extent(trainer: Any) -> tuple[int, int | None, int]:
    """Return the optimizer steps of an epoch, 0 if nobody knows, the epochs, and the steps of the run."""
    batches = trainer.num_training_batches / trainer.accumulate_grad_batches
    of_epoch = math.ceil(batches) if math.isfinite(batches) else 0
    epochs = trainer.max_epochs if (trainer.max_epochs or 0) > 0 else None
    ends = [trainer.max_steps] if trainer.max_steps > 0 else []
    if of_epoch and epochs is not None:
        ends.append(of_epoch * epochs)
    end = min(ends, default=_STEPS)
    return of_epoch, epochs, end


@contextmanager
def shown_progress(module: Any, moment: Moment | None = None) -> Iterator[set[str | Remainder]]:
    """Note what the user's code reads of a run's progress, and show it that of another moment, if one is given.

    Args:
        module: of the run.
        moment: None for what is true.

    Yields:
        The names that were read so far, and remainders that were taken of them.
    """
    read: set[str | Remainder] = set()
    own = {name: getattr(Trainer, name) for name in ("global_step", "current_epoch", "is_last_batch")}

    def shown(name: str, value: Any) -> property:
        def progress(trainer: Trainer) -> Any:
            is_users = trainer is module._trainer and is_of_user(sys._getframe(1))
            if is_users:
                read.add(name)
            if is_users and value is not None:
                return value
            true = own[name].fget(trainer)
            if not is_users or name == "is_last_batch":
                return true
            return _noting_number(
                true, lambda taken, divisor: read.add(Remainder(name, (taken - int(true)) % divisor, divisor))
            )

        return property(progress, own[name].fset)

    try:
        for name, value in zip(own, moment or (None, None, None), strict=True):
            setattr(Trainer, name, shown(name, value))
        yield read
    finally:
        for name, each in own.items():
            setattr(Trainer, name, each)


def is_of_user(frame: FrameType | None) -> bool:
    """Return whether a frame is of the user's code, or of the module's own property that it has read."""
    while frame is not None and frame.f_globals.get("__name__") == __name__:  # shown within a step that is shown again
        frame = frame.f_back
    if frame is not None and frame.f_globals.get("__name__") == LightningModule.__module__:
        is_property = frame.f_code.co_name in ("global_step", "current_epoch")
        frame = frame.f_back if is_property else None
    return frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] not in _LIBRARIES
