"""What a validation does from an epoch on, or with batches of other entries, is compared then: a first one could not show it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.preflight.evaluation import later_evaluations_ranks as ranks


@pytest.mark.parametrize(
    "kind", ["other tokens", "another number", "another entry", "a mean", "a kept mean", "a predicted mean", "counts"]
)
def test_a_later_validation_shows_what_one_device_shows(pools: Any, kind: str):
    (expected,) = pools(1).run(ranks.fit, 1, kind)
    assert len(expected[1]) == {
        "another number": 2,
        "a mean": 2,
        "a kept mean": 3,
        "a predicted mean": 2,
        "counts": 2,
    }.get(kind, 1)
    if "mean" in kind:
        assert any(abs(each) < 1e-12 for each in expected[0].values()), "the rounding of 0 at first"
    for found in pools(2).run(ranks.fit, 2, kind):
        assert found == [pytest.approx(each, rel=1e-6, abs=1e-12) for each in expected]
