"""Tables of each sample's loss that a step writes into its data: those of a part would steer later epochs."""

from __future__ import annotations

import pytest

from tests.preflight.recording import data_sets_ranks as ranks
from tests.slow import slow


@pytest.mark.parametrize(
    ("where", "kind"),
    [
        ("loader", "tensor"),
        ("loader", "array"),
        ("module", "array"),
        ("sampler", "tensor"),
        *slow(("closure", "list"), ("sampler", "list"), ("collate", "list")),
    ],
)
def test_a_step_that_writes_a_parts_numbers_into_its_data_goes_on_in_the_global_view(pools, where, kind):
    [plain] = pools(1).run(ranks.fit, 1, None, where, kind)
    for found in pools(2).run(ranks.fit, 2, dict(ring_size=2), where, kind):
        assert found["whole"]
        assert found["losses"] == pytest.approx(plain["losses"], rel=1e-10)
        assert found["table"] == pytest.approx(plain["table"], rel=1e-10)
        for name, weight in plain["weights"].items():
            assert (found["weights"][name] - weight).abs().max() <= 1e-10, name
