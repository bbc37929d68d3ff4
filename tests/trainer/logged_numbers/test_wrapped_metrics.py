"""torchmetrics of torchmetrics beside fillers."""

from __future__ import annotations

import pytest

from tests.trainer.logged_numbers import wrapped_metrics_ranks as ranks


@pytest.mark.parametrize(
    ("world", "strategy"),
    [
        (2, {"data_parallel_size": 2}),
        pytest.param(4, {"data_parallel_size": 2, "global_view": True}, marks=pytest.mark.slow),
    ],
)
def test_collections_windows_and_trackers_count_no_filler(pools, world, strategy):
    [(alone, best)] = pools(1).run(ranks.fit, 1, None)
    for found, best_of_rank in pools(world).run(ranks.fit, world, strategy):
        assert found == pytest.approx(alone, rel=1e-5)
        assert best_of_rank == pytest.approx(best, rel=1e-5)
