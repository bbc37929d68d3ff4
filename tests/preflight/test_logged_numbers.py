"""What a step logs of its tokens by hand is one device's number by default: such a step goes on in the global view."""

from __future__ import annotations

from typing import Any

import pytest

from tests.preflight import logged_ranks as ranks
from tests.slow import slow

AUTO = dict(global_view="auto", labels_shifted=True)
KINDS = ["by hand", "synchronized", "none at first"]


@pytest.mark.parametrize("strategy", [dict(ring_size=2), *slow(dict(ulysses_size=2))], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_number_by_hand_is_one_devices(pools: Any, kind: str, strategy: dict[str, int]):
    ((wanted, _, _),) = pools(1).run(ranks.fit, kind, 1, {})
    assert any(wanted)
    for shown, is_whole, said in pools(2).run(ranks.fit, kind, 2, strategy | AUTO):
        assert shown == pytest.approx(wanted, rel=1e-6)
        assert is_whole
        assert not any("other numbers" in each for each in said if each.startswith("preflight:")), said


def test_a_number_of_the_whole_batch_stays_on_parts(pools: Any):
    ((wanted, _, _),) = pools(1).run(ranks.fit, "of the batch", 1, {})
    for shown, is_whole, _ in pools(2).run(ranks.fit, "of the batch", 2, dict(ring_size=2) | AUTO):
        assert shown == pytest.approx(wanted, rel=1e-6)
        assert not is_whole


def test_one_that_is_logged_late_is_one_devices_from_then_on(pools: Any):
    ((wanted, _, _),) = pools(1).run(ranks.fit, "late", 1, {})
    (shown, is_whole, said), *_ = pools(2).run(ranks.fit, "late", 2, dict(ring_size=2) | AUTO)
    assert shown[1:] == pytest.approx(wanted[1:], rel=1e-6)
    assert is_whole
    assert ["in the global view from optimizer step 2 on, for what it logs" in each for each in said].count(True) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_without_the_global_view_a_warning_says_so(pools: Any, kind: str):
    found = pools(2).run(ranks.fit, kind, 2, dict(ring_size=2, global_view=False, labels_shifted=True))
    assert "shows other numbers than one device: accuracy = " in " ".join(found[0][2])
