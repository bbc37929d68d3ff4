"""Learning rates, and the rest of an optimizer's groups and schedules, that a step reads: noted in a trial, and shown as later in the run.

    if self.optimizers().param_groups[0]["lr"] < 1e-4: labels[:, : self.skipped] = -100      a trial sees the first rate alone

The run's own schedules say what is to come: they are stepped on, and put back. Where one threshold decides, the largest and the smallest rate
that are still to come show both sides of it.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lightning_sp.step.isolation.snapshot import snapshot
from lightning_sp.trainer.hooks.batch_hooks import of_user
from lightning_sp.trainer.shown_progress import Moment, is_of_user, later_moments

# Steps of a schedule that are each taken, at some 3 us; longer ones are taken in strides.
_MOST_STEPS = 50_000
# A rate that no schedule moves is the user's own to set: it is shown smaller, and larger.
_FACTORS = (1e-3, 1e3)
# How often a plateau may still come.
_PLATEAUS = 20


class _Group(dict[str, Any]):
    """A group of an optimizer that notes what the user's code reads of it, its parameters aside."""

    add: Callable[
        [str], None
    ]  # what was read; the set itself would be put back behind a trial, as others are that an object holds

    def __getitem__(self, name: str) -> Any:
        """Return an entry, noted."""
        self._note(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """Return an entry, noted."""
        self._note(name)
        return super().get(name, default)

    def _note(self, name: str) -> None:
        if name != "params" and is_of_user(sys._getframe(2)):
            self.add(name)


@contextmanager
def noted_rates(trainer: Any) -> Iterator[set[str]]:
    """Note what the user's code reads of optimizers' groups and of schedules.

    Yields:
        The names that were read so far.
    """
    read: set[str] = set()
    with ExitStack() as undo:
        for optimizer in getattr(trainer, "optimizers", ()):
            groups = [_Group(group) for group in optimizer.param_groups]
            for group in groups:
                group.add = read.add
            undo.callback(setattr, optimizer, "param_groups", optimizer.param_groups)
            optimizer.param_groups = groups
        for schedule in _schedules(trainer):
            kind = type(schedule)
            with suppress(TypeError):  # a class of another layout in memory
                schedule.__class__ = type(kind.__name__, (kind,), {"__getattribute__": _noting(read)})
                undo.callback(setattr, schedule, "__class__", kind)
        yield read


def _noting(read: set[str]) -> Any:
    def noted(schedule: Any, name: str) -> Any:
        if not name.startswith("__") and name not in ("step", "optimizer") and is_of_user(sys._getframe(1)):
            read.add(name)
        return object.__getattribute__(schedule, name)

    return noted


def _schedules(trainer: Any) -> list[Any]:
    return [config.scheduler for config in getattr(trainer, "lr_scheduler_configs", ())]


def extreme_moments(module: Any) -> list[Moment]:
    """Return the moments still to come at which rates of a schedule are the largest, and the smallest. Equal on all ranks.

    Args:
        module: of the run.
    """
    trainer, found = module.trainer, list[Moment]()
    for last in later_moments(trainer)[-1:]:
        for config in trainer.lr_scheduler_configs:
            steps = _steps_until(trainer, config, last)
            with _put_back(module):
                rates = {at: _rates(config.scheduler) for at in _stepped(config.scheduler, steps)}
            for group in range(len(next(iter(rates.values()), ()))):
                ends = [choose(rates, key=lambda at: rates[at][group]) for choose in (max, min)]
                found += [_moment_of(trainer, last, at / steps) for at in ends]
    return list(dict.fromkeys(found))


def _moment_of(trainer: Any, last: Moment, part: float) -> Moment:
    """Return the moment at a part of what is still to come."""
    step, epoch = (
        now + math.ceil((then - now) * part)
        for now, then in ((trainer.global_step, last.step), (trainer.current_epoch, last.epoch))
    )
    return Moment(step, epoch)


@contextmanager
def rates_as_at(module: Any, moment: Moment, number: int) -> Iterator[str]:
    """Show optimizers and schedules as at a later moment of the run, and put them back.

    Args:
        module: of the run.
        moment: the moment.
        number: of the moment, among those that are shown: of rates that no schedule moves.

    Yields:
        The rates, in words.
    """
    trainer = module.trainer
    with _put_back(module):
        scheduled = set()
        for config in trainer.lr_scheduler_configs:
            if [*_stepped(config.scheduler, _steps_until(trainer, config, moment))]:
                scheduled.add(id(config.scheduler.optimizer))
        for optimizer in trainer.optimizers:
            for group in optimizer.param_groups if id(optimizer) not in scheduled else ():
                group["lr"] = group["lr"] * _FACTORS[number % len(_FACTORS)]
        rates = [float(group["lr"]) for each in trainer.optimizers for group in each.param_groups]
        yield "lr=" + ", ".join(f"{rate:.3g}" for rate in dict.fromkeys(rates))


@contextmanager
def _put_back(module: Any) -> Iterator[None]:
    restore = snapshot(module, of_user(module.trainer), hooks=True)
    try:
        yield
    finally:
        restore()


def _steps_until(trainer: Any, config: Any, moment: Moment) -> int:
    """Return how often a schedule is stepped until a moment; the user does it, with manual optimization, and no one knows how often."""
    of_epochs = config.interval == "epoch" and trainer.lightning_module.automatic_optimization
    count = moment.epoch - trainer.current_epoch if of_epochs else moment.step - trainer.global_step
    return int(count // config.frequency)


def _rates(schedule: Any) -> list[float]:
    return [float(group["lr"]) for group in schedule.optimizer.param_groups]


def _stepped(schedule: Any, steps: int) -> Iterator[int]:
    """Step a schedule of torch's on, and yield the number of each step behind it; a plateau comes a few times."""
    if isinstance(schedule, ReduceLROnPlateau):
        for at in range(1, min(steps, _PLATEAUS) + 1):
            schedule._reduce_lr(schedule.last_epoch)
            yield at
    elif isinstance(schedule, LRScheduler) and steps > 0:  # one of each other time of the run has none
        stride = math.ceil(steps / _MOST_STEPS)
        for at in range(stride, steps + 1, stride):
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of a schedule that is stepped before its optimizer
                    schedule.last_epoch += stride - 1
                    schedule.step()
            except Exception:
                return  # it has come to its end, as OneCycleLR says by a ValueError; the run raises a user's own error when it comes there
            yield at
