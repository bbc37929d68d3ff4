"""Steps take the batch, its number and its loader's in any of the ways that Lightning allows, and behind decorators of the user's."""

from __future__ import annotations

import pytest

from tests.trainer.whole_runs import signatures_ranks as ranks


@pytest.mark.parametrize("view", [{}, {"global_view": True}], ids=["part", "global"])
def test_a_step_is_given_what_it_takes(pools, view):
    (wanted,) = pools(1).run(ranks.run, None)
    for rank in pools(2).run(ranks.run, {"ring_size": 2, **view}):
        for form, (logged, predicted), (of_one, predicted_by_one) in zip(ranks.FORMS, rank, wanted, strict=True):
            assert logged == pytest.approx(of_one, rel=1e-10), form
            assert predicted == pytest.approx(predicted_by_one, rel=1e-10), form
