"""A step that did what none before did, tried behind it: shown the run, and the user's own numbers, as they were when it began.

if self.global_step % 5 == 4: logits = logits.cumsum(1)      the step behind it, which tries its batch, would not do so
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_sp.step.users_numbers.schedules import Schedules
from lightning_sp.trainer.shown_progress import Moment, shown_progress


class EarlierStep(NamedTuple):
    """A step that is tried behind it: when it was."""

    moment: Moment
    batch_idx: int


def step_in_progress(trainer: Any) -> EarlierStep:
    """Return the step that a trial is to show again."""
    return EarlierStep(
        Moment(trainer.global_step, trainer.current_epoch, trainer.is_last_batch), trainer.fit_loop.batch_idx
    )


@contextmanager
def shown_again(module: Any, then: EarlierStep | None, schedules: Schedules) -> Iterator[None]:
    """Show the step that a trial runs the run as it was then; None: as it is.

    Args:
        module: of the run.
        then: the step.
        schedules: what knows of the user's numbers.
    """
    if then is None:
        yield
        return
    with shown_progress(module, then.moment), schedules.as_before_last_step():
        yield


def say_what_was_not_shown(then: EarlierStep | None, *, are_shown: bool) -> None:
    """Warn where the trial of a step has not done what the step did: it is not known whether that is one device's."""
    if then is not None and not are_shown:
        rank_zero_warn(
            f"training_step's loss at optimizer step {then.moment.step} was made of operations that none before was, and a trial of its batch "
            "did not do them again: whether such steps are one device's was not compared; what decides about them (a number drawn, a time, "
            "something kept outside of the module, tokens that a crop leaves out) should be the same when the same batch comes again"
        )
