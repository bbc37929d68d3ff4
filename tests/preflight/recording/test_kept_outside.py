"""Numbers that a step keeps outside of its module, in its file, class or closure: those of a part would steer later steps."""

from __future__ import annotations

import pytest

from tests.preflight.recording import kept_outside_ranks as ranks
from tests.slow import slow


@pytest.mark.parametrize("where", ["closure", "named by tokens", *slow("file", "class")])
def test_a_step_that_keeps_a_parts_numbers_outside_goes_on_in_the_global_view(pools, where):
    [plain] = pools(1).run(ranks.fit, 1, None, where)
    for found in pools(2).run(ranks.fit, 2, dict(ring_size=2), where):
        assert found["whole"]
        assert found["losses"] == pytest.approx(plain["losses"], rel=1e-10)
        for name, weight in plain["weights"].items():
            assert (found["weights"][name] - weight).abs().max() <= 1e-10, name
