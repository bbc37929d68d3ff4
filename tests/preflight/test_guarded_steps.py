"""A step that checks its tokens, `assert (ids < vocab).all()`: a trial shows it others, of which it is to make no noise."""

from __future__ import annotations

import pytest
import torch

from lightning_sp.errors import SequenceParallelError
from lightning_sp.preflight.failing_steps import say_not_compared
from tests.instruments.told import told
from tests.preflight import guarded_steps_ranks as ranks


def test_trials_of_a_step_with_checks_say_nothing_but_what_agrees(pools):
    for said, printed, others in pools(2).run(ranks.fit):
        assert all("whole and sharded, agree: " in each for each in said), said
        assert printed == "step 0 of 0\nlogged 0\nstep 1 of 1\nlogged 1\n"
        assert others == 0, "no step that draws"


def checked() -> None:
    assert not torch.ones(2).any()


def failed() -> None:
    torch.ones(2)[torch.tensor([7])]


@pytest.mark.parametrize(("step", "of_part"), [(checked, False), (checked, True), (failed, False)])
def test_that_a_step_fails_is_said_where_no_check_of_its_own_would_end_one_device(step, of_part):
    refusal = SequenceParallelError("of the step")
    try:
        step()
    except Exception as error:
        refusal.__cause__ = error
    if of_part:
        refusal.ends_steps = True
    with told() as said:
        say_not_compared("the crop is not compared", SequenceParallelError("wrapped"))
        wrapped = SequenceParallelError("once more")
        wrapped.__cause__ = refusal
        say_not_compared("this one is not compared", wrapped)
    wanted = ["preflight: the crop is not compared: wrapped", "preflight: this one is not compared: once more"]
    assert said == wanted[: 1 if step is checked and not of_part else 2]
