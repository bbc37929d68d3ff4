"""A padding mask that a step has changed, which no rank knows whole: refused on all ranks, and one device's in the global view."""

from __future__ import annotations

import pytest

from lightning_sp.testing import max_error
from tests.rewrite.hugging_face import changed_masks_ranks as ranks

KINDS = {
    "its own": "that hides tokens reached the model, and that of the batch hides none",
    "in place": "is not the batch's attention_mask",
}


@pytest.mark.parametrize("kind", KINDS)
def test_on_parts_it_is_refused_at_the_step_that_hides_more(pools, kind):
    answers = pools(2).run(ranks.fit, 2, {"ring_size": 2, "preflight": False}, kind == "in place")
    for error, losses, _ in answers:
        assert KINDS[kind] in error
        assert "global_view=True" in error
        assert len(losses) == 2


def test_a_mask_of_the_batch_that_hides_nothing_is_not_asked_about(pools):
    """It would wait for the device in each step."""
    assert pools(2).run(ranks.asked, False) == [[0.0, 0.0]] * 2
    assert pools(2).run(ranks.asked, True) == [[1.0, 1.0]] * 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_global_view_carries_it(pools, kind):
    [(_, _, plain)] = pools(1).run(ranks.fit, 1, None, kind == "in place")
    for error, _, weights in pools(2).run(ranks.fit, 2, {"ring_size": 2, "global_view": True}, kind == "in place"):
        assert not error
        for name, wanted in plain.items():
            assert max_error(weights[name], wanted) < 1e-10, name
