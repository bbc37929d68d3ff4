"""What is read from the Trainer's loops."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from lightning.pytorch.trainer.states import TrainerFn

from lightning_sp.trainer import loops


def trainer_at(*, ready: int, is_last: bool, training: bool, fn: TrainerFn) -> SimpleNamespace:
    """A Trainer of two micro-batches a step that has counted some of an epoch."""
    counted = ready % 2 == 0
    fit = SimpleNamespace(
        epoch_loop=SimpleNamespace(_accumulated_batches_reached=lambda: counted),
        _should_accumulate=lambda: not (counted or is_last),
    )
    return SimpleNamespace(fit_loop=fit, training=training, state=SimpleNamespace(fn=fn))


@pytest.mark.parametrize(
    ("ready", "is_last", "training", "fn", "begins"),
    [
        (4, False, True, TrainerFn.FITTING, True),
        (5, False, True, TrainerFn.FITTING, False),
        # The second of a window, and the last of an epoch, which the loop knows before it has counted it.
        (5, True, True, TrainerFn.FITTING, False),
        # A validation behind a window that the epoch's end has cut short.
        (5, True, False, TrainerFn.FITTING, True),
        (5, False, False, TrainerFn.FITTING, False),
        (5, False, False, TrainerFn.VALIDATING, True),
    ],
)
def test_which_batch_begins_an_optimizer_step(ready, is_last, training, fn, begins):
    found = loops.of_batch(trainer_at(ready=ready, is_last=is_last, training=training, fn=fn))
    assert found == {"begins": begins, "trains": training}
