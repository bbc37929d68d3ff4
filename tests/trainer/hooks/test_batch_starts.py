"""Hooks before a step have whole batches, what they change is split anew, and what they draw is one order for a whole sequence."""

from __future__ import annotations

import pytest

from lightning_sp.testing import max_error
from tests.trainer.hooks import batch_start_ranks as ranks


def hold_the_law(pools, strategy, length, draws):
    [expected] = pools(1).run(ranks.fit, None, 1, length, draws)
    for actual in pools(2).run(ranks.fit, strategy, 2, length, draws):
        assert not actual["error"], actual["error"]
        assert actual["seen"] == expected["seen"]
        assert actual["left"] == []
        assert actual["losses"] == pytest.approx(expected["losses"], rel=1e-10)
        assert actual["logged"] == pytest.approx(expected["logged"], rel=1e-6)
        for name, weight in expected["weights"].items():
            assert max_error(actual["weights"][name], weight) < 1e-10, name


def test_hooks_before_a_step_do_what_they_do_on_one_device(pools):
    hold_the_law(pools, dict(ring_size=2, global_view=False), 32, False)


def test_without_the_preflight_too(pools):
    hold_the_law(pools, dict(ulysses_size=2, preflight=False, global_view=True), 32, True)


def test_an_entry_that_a_hook_adds_is_refused_where_it_would_need_padding(pools):
    for found in pools(2).run(ranks.fit, dict(ring_size=2, preflight=False), 2, 29):
        assert "on_train_batch_start leaves a batch that cannot be split: sequences of 29 tokens" in found["error"]
        assert found["error"].endswith("use global_view=True, in which such a hook has the step's own batch")


@pytest.mark.slow
def test_such_an_entry_is_carried_in_the_global_view(pools):
    hold_the_law(pools, dict(ring_size=2, global_view="auto"), 29, False)


@pytest.mark.slow
def test_what_they_draw_is_one_order_for_all_tokens_of_a_row(pools):
    hold_the_law(pools, dict(ring_size=2, global_view="auto"), 32, True)


def test_a_hook_that_makes_other_batches_on_the_ranks_of_a_sequence_is_refused(pools):
    for found in pools(2).run(ranks.fit_apart, dict(ring_size=2, preflight=False)):
        assert "on_train_batch_start leaves another batch on each of the 2 ranks of a sequence" in found["error"]
