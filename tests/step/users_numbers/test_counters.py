"""A step that counts its batches itself is tried as at later ones."""

from __future__ import annotations

from functools import partial
from queue import LifoQueue, Queue
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lightning_sp.step.users_numbers.counters import Counter, counted_on, noting_counters, reads_batch_index
from lightning_sp.step.users_numbers.schedules import Schedules
from lightning_sp.testing import assert_sharded_equals_unsharded
from lightning_sp.users_code.iterators import Count
from tests.slow import slow
from tests.step.users_numbers import counted_ranks
from tests.step.users_numbers import schedules_ranks as ranks

SEEN = {"rows": 0}
calls = 0


class Model(nn.Module):
    total = 0

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.mean, self.told, self.phase = 0, 0.0, False, "first"

    def step(self) -> int:
        self.seen, self.mean, self.told, self.phase, self.new = self.seen + 2, 0.5, True, "second", 3
        return self.seen


def test_whole_numbers_that_a_step_adds_to_are_noted():
    model, found = Model(), []
    run = noting_counters(model.step, SimpleNamespace(lightning_module=model, callbacks=[]), found)
    assert run() == 2
    assert found == [Counter(model, "seen", 2)]


def test_a_counter_is_shown_later_and_put_back():
    model = Model()
    with counted_on([Counter(model, "seen", 2)], 600, set()) as shown:
        assert (model.seen, shown) == (1200, "seen=1,200")
    assert model.seen == 0
    with counted_on([], 600, set()) as shown:
        assert shown == ""


@pytest.mark.parametrize(("kind", "after", "shown"), [("steps", 0, "steps=7"), ("batches", 3, "batches=7")])
def test_what_begins_at_a_later_count_is_refused_before_it(pools, kind, after, shown):
    for found in pools(2).run(ranks.fit, kind):
        assert "as at optimizer step 7 in epoch 0 (" in found["error"]
        assert shown in found["error"]
        assert "gives another result on shards than whole" in found["error"]
        assert found["steps"] == after


@pytest.mark.parametrize("kind", ["attribute", "batch_idx", *slow("entry", "tensor", "read")])
def test_what_the_third_of_six_batches_does_is_refused_before_the_first(pools, kind):
    for found in pools(2).run(ranks.fit, kind):
        assert "as at optimizer step 2 in epoch 0 (" in found["error"]
        assert "=2)" in found["error"]
        assert "gives another result on shards than whole" in found["error"]
        assert found["steps"] == 0


@pytest.mark.slow
def test_a_count_that_is_an_index_and_begins_anew_is_not_compared_beyond_what_it_reads(pools):
    for found in pools(2).run(ranks.fit, "index"):
        assert found == {"error": "", "steps": 8}


def test_numbers_are_found_where_users_keep_them():
    model = Model()
    model.state, model.space, model.rows, model.done = {"n": 0}, SimpleNamespace(n=0), [], False
    model.register_buffer("steps", torch.zeros((), dtype=torch.long))
    model.texts, model.words = ["a"], {str(each): each for each in range(5_000)}
    found = []

    def step() -> None:
        global calls
        calls += 3
        SEEN["rows"] += 4
        model.state["n"] += 1
        model.space.n += 2
        model.rows.append(0.5)
        model.texts.append("b")
        model.words["0"] += 1
        model.steps += 1
        Model.total += 1
        model.mean += 0.25

    noting_counters(step, SimpleNamespace(lightning_module=model, callbacks=[]), found)()
    assert {(type(each.owner), each.name): each.each for each in found} == {
        (type, "total"): 1, (dict, "n"): 1, (SimpleNamespace, "n"): 2, (list, "length"): 1, (dict, "steps"): 1, (dict, "calls"): 3,
        (dict, "rows"): 4,
    }  # fmt: skip
    with counted_on(found, 10, set()):
        assert (model.state["n"], model.space.n, len(model.rows), int(model.steps), Model.total) == (11, 22, 11, 11, 11)
        assert (calls, SEEN) == (33, {"rows": 44})
    assert (calls, SEEN) == (3, {"rows": 4})
    assert (model.state["n"], model.space.n, model.rows, int(model.steps), Model.total) == (1, 2, [0.5], 1, 1)
    model.rows.append("no number")
    with counted_on(found, 10, set()):
        assert len(model.rows) == 2


def test_counts_of_iterators_closures_and_what_functions_are_given_are_found():
    model, own, found = Model(), 0, []

    def add() -> int:
        nonlocal own
        own += 2
        return own

    model.ids, model.add, model.given = Count(3), add, partial(list.append, [1, 5])

    def step() -> None:
        next(model.ids)
        model.add()
        model.given.args[0][1] += 1

    noting_counters(step, SimpleNamespace(lightning_module=model, callbacks=[]), found)()
    assert {each.name: each.each for each in found} == {"ids": 1, "cell_contents": 2, 1: 1}
    with counted_on(found, 10, set()):
        assert (model.ids.value, own, model.given.args[0]) == (14, 22, [1, 16])
    assert (model.ids.value, own, model.given.args[0]) == (4, 2, [1, 6])


def test_a_counter_is_not_shown_beyond_its_end():
    index = SimpleNamespace(batch_idx=0)
    with counted_on([Counter(index, "batch_idx", 1, 7)], 600, set()):
        assert index.batch_idx == 7


def put(queue: Queue) -> None:
    queue.put_nowait(0.5)


@pytest.mark.parametrize("kind", [Queue, LifoQueue])
def test_a_queue_is_shown_with_no_more_than_it_may_hold(kind):
    model, found, schedules = Model(), [], Schedules()
    model.queue = kind(maxsize=8)
    trainer = SimpleNamespace(
        lightning_module=model, callbacks=[], training=True, current_epoch=0, accumulate_grad_batches=1
    )
    put(model.queue)
    noting_counters(partial(put, model.queue), trainer, found)()
    schedules.start(trainer)
    for _ in range(4):
        put(model.queue)
        schedules.have_changed(trainer, object())
    for counters in (found, schedules.take_numbers().counters):
        with counted_on(counters, 100, set()):
            assert (model.queue.qsize(), model.queue.unfinished_tasks) == (8, 6)
        assert model.queue.qsize() == 6


def test_whether_a_step_reads_its_index_is_seen_in_its_code():
    class Reads:
        def training_step(self, batch: object, number: int) -> bool:
            return number > 3

    class Ignores:
        def training_step(self, batch: object, number: int) -> object:
            return batch

    assert (reads_batch_index(Reads()), reads_batch_index(Ignores()), reads_batch_index(object())) == (
        True,
        False,
        False,
    )


@pytest.mark.parametrize("kind", ["frozen", "stopped", "rate", "index", "entry", "file", "grown", *slow("iterator")])
def test_what_comes_later_in_a_run_is_one_devices(pools, kind):
    (alone,) = pools(1).run(counted_ranks.fit, kind, False)
    for found in pools(2).run(counted_ranks.fit, kind, True):
        assert found["steps"] == alone["steps"]
        weights = alone["weights"]
        assert_sharded_equals_unsharded([found["weights"][name] for name in weights], [*weights.values()], [*weights])
