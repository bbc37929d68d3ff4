"""Numbers of the user's that stay for some batches and change are told: the step may do other things from there on."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lightning_sp.step.users_numbers.counters import Counter
from lightning_sp.step.users_numbers.schedules import Schedules
from tests.slow import slow
from tests.step.users_numbers import schedules_ranks as ranks


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.phase, self.skipped, self.seen, self.mean = "first", 0, 0, 0.0
        self.layer = nn.Dropout(0.0)


def followed():
    model = Model()
    trainer = SimpleNamespace(
        lightning_module=model, callbacks=[], training=True, current_epoch=0, accumulate_grad_batches=1
    )
    schedules = Schedules()
    schedules.start(trainer)
    return model, trainer, schedules


def told(schedules, trainer, model, batches):
    found = []
    for _ in range(batches):
        model.seen, model.mean = model.seen + 1, model.mean * 0.9 + 1.0
        found.append(schedules.have_changed(trainer, object()))
    return found


def test_what_stays_and_then_changes_is_told_once():
    model, trainer, schedules = followed()
    assert told(schedules, trainer, model, 4) == [False] * 4
    model.skipped = 3
    assert told(schedules, trainer, model, 3) == [True, False, False]
    model.phase, trainer.current_epoch = "second", 1
    assert told(schedules, trainer, model, 3) == [True, False, False]
    model.layer.p = 0.1  # no module of the user's
    model.tensor = torch.zeros(1)
    assert told(schedules, trainer, model, 2) == [False, False]
    trainer.training, model.phase = False, "third"
    assert not schedules.have_changed(trainer, object())


def test_modules_that_a_hook_changes_and_batches_of_other_entries_are_told():
    model, trainer, schedules = followed()
    assert told(schedules, trainer, model, 4) == [False] * 4
    model.layer.eval()
    assert told(schedules, trainer, model, 3) == [True, False, False]
    model.layer.register_forward_hook(lambda *_: None)
    assert told(schedules, trainer, model, 3) == [True, False, False]
    model.layer.forward = lambda x: x
    schedules.have_changed(trainer, object())
    model.layer = nn.Identity()
    assert not schedules.have_changed_in_hooks(trainer)  # it did not stay
    model, trainer, schedules = followed()
    batches = [{"x": torch.zeros(2)}] * 4 + [{"x": torch.zeros(2), "y": 1}] * 3 + [{"x": torch.zeros(2).int(), "y": 1}]
    found = [schedules.have_changed(trainer, dict(each)) for each in batches]
    assert [index for index, each in enumerate(found) if each] == [4, 7]


def test_a_flag_or_a_text_that_none_before_was_is_told_though_the_last_did_not_stay():
    model, trainer, schedules = followed()
    model.is_late, model.last, found = False, None, []
    for number in range(9):
        found.append(schedules.have_changed(trainer, object()))
        model.is_late, model.phase = number % 2 == 0, f"phase {number}" if number > 4 else "first"
        model.last = float(number)
    assert found == [False, True, False, False, False, False, True, True, True]


def test_of_many_flags_the_first_eight_are_told_at_once_and_the_others_as_changes_are():
    model, trainer, schedules = followed()
    for number in range(20):
        setattr(model, f"is_{number}", False)
    found = []
    for number in range(20):
        found.append(schedules.have_changed(trainer, object()))
        setattr(model, f"is_{number}", True)
    assert [index for index, each in enumerate(found) if each] == [*range(1, 10), 17]


TASKS = {
    "a text": ["plain", "other"],
    "a flag": [torch.tensor(False), torch.tensor(True)],
    "rows alike": [torch.tensor([3, 3]), torch.tensor([4, 4])],
    "texts alike": [["plain", "plain"], ["other", "other"]],
}


@pytest.mark.parametrize("kind", TASKS)
def test_a_batch_of_a_task_that_none_before_had_is_told_once(kind):
    _, trainer, schedules = followed()
    first, second = TASKS[kind]
    batches = [{"x": torch.zeros(2, 3), "task": each} for each in (first, first, second, first, second)]
    assert [schedules.have_changed(trainer, each) for each in batches] == [False, False, True, False, False]


def test_an_entry_that_numbers_batches_is_told_three_times():
    _, trainer, schedules = followed()
    batches = [{"x": torch.zeros(2, 3), "index": number, "grades": torch.tensor([number, 1])} for number in range(9)]
    found = [schedules.have_changed(trainer, each) for each in batches[2:]]
    assert found == [False, True, True, True, False, False, False]


def test_a_step_is_shown_the_numbers_that_it_began_with():
    model, trainer, schedules = followed()
    model.seen_batches, model.table, model.tensor = [], {"loss": 1.0}, torch.zeros(())
    schedules.start(trainer)
    for number in range(3):
        schedules.have_changed(trainer, object())
        if number < 2:
            model.seen, model.phase = model.seen + 1, f"phase {number}"
            model.seen_batches.append(number)
            model.table["loss"] /= 2
            model.tensor += 1
    late = model.seen, model.phase, list(model.seen_batches), dict(model.table), float(model.tensor)
    with schedules.as_before_last_step():
        shown = model.seen, model.phase, list(model.seen_batches), dict(model.table), float(model.tensor)
    assert shown == (1, "phase 0", [0], {"loss": 0.5}, 1.0)
    assert (
        model.seen,
        model.phase,
        list(model.seen_batches),
        dict(model.table),
        float(model.tensor),
    ) == late


def test_many_changes_are_told_more_and_more_seldom():
    model, trainer, schedules = followed()
    found = []
    for change in range(40):
        model.skipped = change
        found += [any(told(schedules, trainer, model, 3))]
    assert [index for index, each in enumerate(found) if each] == [1, 2, 3, 4, 8, 16, 32]


def test_what_each_batch_adds_as_much_to_is_a_counter_once():
    model, trainer, schedules = followed()
    told(schedules, trainer, model, 2)
    assert schedules.take_numbers().counters == []
    told(schedules, trainer, model, 1)
    assert schedules.take_numbers().counters == [Counter(model, "seen", 1)]
    told(schedules, trainer, model, 3)
    assert schedules.take_numbers().counters == []


def test_a_batch_that_is_handed_over_twice_is_one():
    model, trainer, schedules = followed()
    for _ in range(6):
        model.seen += 1
        batch = object()
        assert [schedules.have_changed(trainer, batch) for _ in range(3)] == [False] * 3


def test_what_each_optimizer_step_adds_to_is_a_counter_of_its_micro_batches():
    model, trainer, schedules = followed()
    trainer.accumulate_grad_batches = 3
    for number in range(12):
        model.seen += number % 3 == 2
        assert not schedules.have_changed(trainer, object())
    assert schedules.take_numbers().counters == [(model, "seen", 1 / 3, None)]


def test_a_hook_at_a_batch_start_sets_a_phase_and_counts():
    model, trainer, schedules = followed()
    found = []
    for number in range(9):
        schedules.have_changed(trainer, object())
        model.seen, model.skipped = model.seen + 1, 3 * (number == 6)
        found.append(schedules.have_changed_in_hooks(trainer))
    assert found == [number == 6 for number in range(9)]
    assert schedules.take_numbers().counters == [Counter(model, "seen", 1)]


@pytest.mark.parametrize(
    ("kind", "step"), [("epoch", 4), ("callback", 6), ("hook", 5), ("module", 5), *slow(("flag", 1)), ("own flag", 1)]
)
def test_the_step_in_which_one_changes_is_tried_before_it(pools, kind, step):
    for found in pools(2).run(ranks.fit, kind):
        assert f"after {step} optimizer steps gives another result on shards than whole" in found["error"]
        assert found["steps"] == step


def test_a_batch_of_another_task_is_tried_before_its_step(pools):
    ((expected, _),) = pools(1).run(ranks.of_tasks, 1)
    for losses, is_whole in pools(2).run(ranks.of_tasks, 2):
        assert is_whole == [False, False, True, True]
        assert losses == pytest.approx(expected, rel=1e-6)
