"""A number that a training step logs late, of a rank's own tokens, is named as one of the first batch is."""

from __future__ import annotations

from typing import Any

import pytest

from tests.preflight import late_numbers_ranks as ranks


@pytest.mark.parametrize(("kind", "step"), [("second batch", 2), ("second epoch", 3)])
def test_a_number_that_is_logged_late_is_compared_behind_its_step(pools: Any, kind: str, step: int):
    (said, *_) = pools(2).run(ranks.fit, kind)
    assert len(said) == 1, said
    assert said[0].startswith(
        f"preflight: training_step on a crop of 2 x 16 tokens after {step} optimizer steps shows other numbers than one device: largest ="
    )
