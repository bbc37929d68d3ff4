"""Behind a run nothing of this package holds the model: a sweep that trains one after the other has the memory of one."""

from __future__ import annotations

import pytest

from tests.trainer.whole_runs import freed_ranks as ranks


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [dict(ring_size=2), dict(ulysses_size=2, global_view=True)], ids=str)
def test_a_model_is_freed_behind_its_run(pools, strategy):
    assert pools(2).run(ranks.is_left, strategy) == [[], []]
