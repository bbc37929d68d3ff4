"""What a window of accumulation has counted goes with it where no step ends it."""

from __future__ import annotations

import pytest

from lightning_sp.testing import max_error
from tests.slow import slow
from tests.trainer.optimizers import skipped_window_ranks as ranks


@pytest.mark.parametrize(
    ("kind", "whole"), [("steps nothing", False), *slow(("in the middle", False)), ("in the middle", True)]
)
def test_a_window_without_a_step_leaves_nothing_to_the_next(pools, kind, whole):
    [alone] = pools(1).run(ranks.fit, kind, 1, None)
    strategy = {"ulysses_size": 2, "preflight": not whole, "sync_each_batch": not whole}
    for weights in pools(2).run(ranks.fit, kind, 2, strategy):
        for name, weight in alone.items():
            assert max_error(weights[name], weight) < 1e-10, name
