"""A step that counts its batches itself is tried as at later ones."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch import nn

from lightning_sp.step.counters import Counter, counted_on, noting_counters
from tests.step import schedules_ranks as ranks


class Model(nn.Module):
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
    with counted_on([Counter(model, "seen", 2)], 600) as shown:
        assert (model.seen, shown) == (1200, "seen=1,200")
    assert model.seen == 0
    with counted_on([], 600) as shown:
        assert shown == ""


@pytest.mark.parametrize(("kind", "after", "shown"), [("steps", 0, "steps=7"), ("batches", 3, "batches=7")])
def test_what_begins_at_a_later_count_is_refused_before_it(pools, kind, after, shown):
    for found in pools(2).run(ranks.fit, kind):
        assert "as at optimizer step 7 in epoch 0 (" in found["error"]
        assert shown in found["error"]
        assert "gives another result on shards than whole" in found["error"]
        assert found["steps"] == after


def test_a_count_that_is_an_index_and_begins_anew_is_not_compared_beyond_what_it_reads(pools):
    for found in pools(2).run(ranks.fit, "index"):
        assert found == {"error": "", "steps": 8}
