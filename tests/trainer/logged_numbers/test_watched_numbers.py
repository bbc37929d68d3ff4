"""A number that agreed with one device's by chance is named once it differs between the ranks of a sequence."""

from __future__ import annotations

from typing import Any

import pytest

from tests.slow import slow
from tests.trainer.logged_numbers import watched_ranks as ranks


@pytest.mark.parametrize("strategy", [dict(ring_size=2), *slow(dict(ulysses_size=2))], ids=str)
def test_a_share_that_was_0_by_chance_is_named_once(pools: Any, strategy: dict[str, int]):
    said, of_other = pools(2).run(ranks.fit, 2, strategy)
    assert said == ["share", " after 3 optimizer steps: ['hits', 'becomes other']"]
    assert of_other == []


@pytest.mark.slow
def test_the_global_view_shows_the_whole(pools: Any):
    assert pools(2).run(ranks.fit, 2, dict(ring_size=2, global_view=True)) == [[], []]
