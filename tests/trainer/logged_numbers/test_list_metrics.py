"""Metrics that keep lists are one device's where data-parallel groups have unequally many batches: torchmetrics alone ends the process."""

from __future__ import annotations

import pytest

from tests.trainer.logged_numbers import list_metrics_ranks as ranks


@pytest.mark.parametrize("rows", [1, 3])
def test_lists_of_groups_of_which_one_has_fewer_batches(pools, rows):
    [found] = pools(1).run(ranks.validate, 1, None, rows)
    for answer in pools(2).run(ranks.validate, 2, {"data_parallel_size": 2}, rows):
        assert answer == pytest.approx(found, rel=1e-6)
