"""What a window of accumulation has counted goes with it where no step ends it."""

from __future__ import annotations

import pytest

from lightning_sp.testing import max_error
from tests.trainer.optimizers import skipped_window_ranks as ranks


@pytest.mark.parametrize("kind", ["steps nothing", "in the middle"])
def test_a_window_without_a_step_leaves_nothing_to_the_next(pools, kind):
    [alone] = pools(1).run(ranks.fit, kind, 1, None)
    for weights in pools(2).run(ranks.fit, kind, 2, {"ulysses_size": 2}):
        for name, weight in alone.items():
            assert max_error(weights[name], weight) < 1e-10, name
