"""A step that reads how far its run is, is tried as at later steps."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_sp.trainer.noted_remainders import Remainder
from lightning_sp.trainer.shown_progress import Moment, later_moments, remainder_moments, shown_progress
from tests.step.users_numbers import schedules_ranks as ranks


def run(**options: Any) -> Any:
    usual = dict(
        num_training_batches=10, accumulate_grad_batches=1, max_steps=-1, max_epochs=4, global_step=0, current_epoch=0
    )
    return SimpleNamespace(**{**usual, **options})


@pytest.mark.parametrize(
    ("options", "moments"),
    [
        ({}, [(4, 0), (20, 2), (39, 3, True)]),
        ({"accumulate_grad_batches": 4}, [(1, 0), (6, 2), (11, 3, True)]),
        ({"max_steps": 20, "max_epochs": -1}, [(2, 0), (10, 1), (19, 1, True)]),
        ({"max_steps": 1}, []),
        ({"global_step": 30, "current_epoch": 3}, [(39, 3, True)]),
        ({"num_training_batches": float("inf"), "max_epochs": -1}, [(1000, 10), (5000, 50), (9999, 99, True)]),
        (
            {"num_training_batches": float("inf"), "max_steps": 100, "max_epochs": None},
            [(10, 10), (50, 50), (99, 99, True)],
        ),
    ],
    ids=str,
)
def test_moments_that_are_still_to_come(options, moments):
    assert later_moments(run(**options)) == [Moment(*each) for each in moments]


def test_the_users_code_alone_is_shown_another_moment():
    module, trainer = pl.LightningModule(), pl.Trainer(logger=False, enable_checkpointing=False, barebones=True)
    module.trainer = trainer
    with shown_progress(module) as read:
        assert read == set()
        assert module.global_step == 0
        assert read == {"global_step"}
    with shown_progress(module, Moment(7, 2)) as read:
        assert (module.global_step, trainer.global_step, trainer.current_epoch) == (7, 7, 2)
        assert not trainer.is_last_batch
        assert trainer.fit_loop.epoch_progress.current.processed == 0
        assert pl.Trainer(barebones=True).global_step == 0  # another run's
    with shown_progress(module, Moment(7, 2, True)) as read:
        assert trainer.is_last_batch
        assert read == {"is_last_batch"}
    assert not trainer.is_last_batch
    assert module.global_step == module.current_epoch == trainer.global_step == 0


def test_remainders_that_a_step_takes_are_noted():
    module = pl.LightningModule()
    module.trainer = pl.Trainer(logger=False, enable_checkpointing=False, barebones=True)
    with shown_progress(module) as read:
        assert (module.global_step + 1) % 16 == 1
        assert (2 + module.current_epoch - 3) % 4 == 3
        assert module.global_step % 1 == 0
        assert (module.global_step + 0.5) % 2 == 0.5
        assert type(copy.deepcopy(module.global_step)) is type(pickle.loads(pickle.dumps(module.global_step))) is int
    step, epoch = Remainder("global_step", 1, 16), Remainder("current_epoch", 3, 4)
    compared = {step._replace(wanted=each) for each in (0, 1)} | {epoch._replace(wanted=each) for each in (2, 3)}
    assert read == {"global_step", "current_epoch", step, epoch, *compared}


@pytest.mark.parametrize(
    ("options", "remainder", "moments"),
    [
        ({}, ("global_step", 1, 16), [(15, 1), (14, 1)]),
        ({}, ("global_step", 0, 16), [(15, 1)]),  # 0 is now
        ({}, ("global_step", 0, 5), []),  # 4 is known, 0 is now
        ({}, ("global_step", 0, 100), []),  # it ends before
        ({"global_step": 12, "current_epoch": 1}, ("global_step", 0, 16), [(16, 1), (15, 1)]),
        ({}, ("current_epoch", 0, 2), [(10, 1)]),
        ({}, ("current_epoch", 0, 9), []),
        ({"num_training_batches": float("inf"), "max_epochs": -1}, ("global_step", 1, 16), [(15, 0), (14, 0)]),
    ],
    ids=str,
)
def test_moments_of_a_remainder_that_no_other_shows(options, remainder, moments):
    known = [Moment(4, 0), Moment(20, 2)]
    assert remainder_moments(run(**options), {Remainder(*remainder)}, known) == [Moment(*each) for each in moments]


def test_what_every_sixth_step_does_is_refused_before_the_first(pools):
    for found in pools(2).run(ranks.fit, "every sixth"):
        assert (
            "as at optimizer step 5 in epoch 0 (batch_idx=5) gives another result on shards than whole"
            in found["error"]
        )
        assert found["steps"] == 0


def test_what_begins_at_a_later_step_is_refused_before_the_first(pools):
    for found in pools(2).run(ranks.fit, "step"):
        assert (
            "as at optimizer step 7 in epoch 0 (batch_idx=7) gives another result on shards than whole"
            in found["error"]
        )
        assert found["steps"] == 0


def test_what_an_epochs_last_batch_does_is_refused_before_the_first(pools):
    for found in pools(2).run(ranks.fit, "last batch"):
        assert (
            "as at optimizer step 7 in epoch 0 (batch_idx=7) gives another result on shards than whole"
            in found["error"]
        )
        assert found["steps"] == 0
