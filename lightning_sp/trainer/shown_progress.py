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
from functools import partial
from types import FrameType
from typing import Any, NamedTuple

from lightning.pytorch import LightningModule, Trainer

from lightning_sp.trainer.noted_remainders import Remainder, all_wanted, noted_number

_LIBRARIES = ("lightning", "pytorch_lightning", "lightning_sp", "torch", "torchmetrics")
# Of a run: what begins is still there at half of it, or at its end.
_PARTS = (0.1, 0.5, 1.0)
# Of a run that says no end.
_STEPS, _EPOCHS = 10_000, 100
# Of what a step asks of remainders.
_MOST_REMAINDERS = 16


class Moment(NamedTuple):
    """A moment of a run.

    Args:
        step: its optimizer steps so far.
        epoch: its epochs so far.
        is_last_batch: whether its batch is an epoch's last one; None for what is true now.
        batches: how many batches from now on; None for those of its steps.
    """

    step: int
    epoch: int
    is_last_batch: bool | None = None
    batches: int | None = None

    def describe(self) -> str:
        """Return it in words."""
        return f"as at optimizer step {self.step:,} in epoch {self.epoch}"


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
    """Return moments still to come at which remainders are what a step asks for, if none shows that. Equal on all ranks.

    Args:
        trainer: of the run.
        remainders: that any rank's step takes.
        known: moments that are shown beside them.
    """
    of_epoch, epochs, end = _extent(trainer)
    now = Moment(trainer.global_step, trainer.current_epoch, None, 0)
    found = [now, *known]
    for each in all_wanted(remainders)[:_MOST_REMAINDERS]:
        if any(_shows(moment, each) for moment in found):
            continue
        ahead = each.ahead(_number(now, each))
        if ahead is None:
            continue
        step, epoch, batches = now.step, now.epoch, None
        if each.name == "current_epoch":
            epoch += ahead
            step = max(epoch * of_epoch, now.step)
        else:
            batches = ahead if each.name == "batches" else None
            step += ahead if batches is None else ahead // trainer.accumulate_grad_batches
            epoch = max(step // of_epoch, now.epoch) if of_epoch else now.epoch
        if step < end and (epochs is None or epoch < epochs):
            found.append(Moment(step, epoch, None, batches))
    return found[1 + len(known) :]


def _shows(moment: Moment, remainder: Remainder) -> bool:
    """Return whether a step at a moment sees a remainder as is wanted; counters of a moment of steps may have come to their end."""
    if remainder.name == "batches" and moment.batches is None:
        return False
    return remainder.at(_number(moment, remainder)) == remainder.wanted


def _number(moment: Moment, remainder: Remainder) -> int:
    numbers = {"global_step": moment.step, "current_epoch": moment.epoch, "batches": moment.batches or 0}
    return numbers[remainder.name]


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

    def note(name: str, true: int, value: int, divisor: int, wanted: int | None) -> None:
        read.add(Remainder(name, (value - true) % divisor, divisor, wanted=wanted))

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
            return noted_number(true, partial(note, name, int(true)))

        return property(progress, own[name].fset)

    try:
        for name, value in zip(own, moment[:3] if moment else (None, None, None), strict=True):
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
