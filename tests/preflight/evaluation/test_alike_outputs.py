"""Whether a value is along the sequence is known by what it is at two lengths, and not by numbers that all ranks may have alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.preflight.evaluation import alike_outputs_ranks as ranks


@pytest.mark.parametrize("global_view", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_values_that_all_ranks_have_alike_are_one_devices(pools: Any, global_view: bool):
    [(_, alone)] = pools(1).run(ranks.shown, 1, None)
    for error, found in pools(2).run(ranks.shown, 2, dict(ring_size=2, global_view=global_view)):
        assert not error
        for own, wanted in zip(found, alone, strict=True):
            assert own == wanted if isinstance(wanted, str) else torch.equal(own, wanted), (own, wanted)


def test_where_no_trial_has_shown_it_they_are_refused_by_name(pools: Any):
    for error, _ in pools(2).run(ranks.shown, 2, dict(ring_size=2, preflight=False)):
        assert "predict_step returns" in error, error


def test_whole_numbers_of_which_one_in_a_hundred_is_another_are_refused(pools: Any):
    [(_, alone)] = pools(1).run(ranks.neighbours, 1, None)
    assert torch.cat(alone).sum() == 2
    for error, _ in pools(2).run(ranks.neighbours, 2, dict(ring_size=2)):
        assert "1 of its 128 elements differ" in error, error
    for error, found in pools(2).run(ranks.neighbours, 2, dict(ring_size=2, global_view="auto")):
        assert not error
        assert torch.equal(torch.cat(found), torch.cat(alone))
