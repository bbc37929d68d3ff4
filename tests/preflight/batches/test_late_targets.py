"""A first batch without targets shows nothing: the next one is tried in its place."""

from __future__ import annotations

import pytest

from tests.preflight.batches import late_targets_ranks as ranks


def test_the_batch_after_one_without_targets_is_tried_before_its_step(pools):
    [plain] = pools(1).run(ranks.fit, 1, None)
    for found in pools(2).run(ranks.fit, 2, dict(ring_size=2)):
        assert found["losses"] == pytest.approx(plain["losses"], rel=1e-10)
        for name, weight in plain["weights"].items():
            assert (found["weights"][name] - weight).abs().max() <= 1e-10, name
    said = [each for each in found["said"] if "every target of the first batch is ignored" in each]
    assert len(said) <= 1  # rank 0 alone says it


def test_of_a_window_whose_first_micro_batch_has_none_the_others_are_said_to_be_untried(pools):
    said = pools(2).run(ranks.fit, 2, dict(ring_size=2), 2)[0]["said"]
    assert any(
        "in the global view from optimizer step 1 on. The first micro-batch of the one before had no targets" in each
        for each in said
    )


def test_a_batch_of_other_entries_is_tried_before_its_step(pools):
    [plain] = pools(1).run(ranks.fit, 1, None, 1, True)
    for found in pools(2).run(ranks.fit, 2, dict(ring_size=2), 1, True):
        assert found["whole"]
        assert found["losses"] == pytest.approx(plain["losses"], rel=1e-10)
