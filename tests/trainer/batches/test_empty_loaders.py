"""An evaluation of an empty data set is left out, as on one device; a training of one is refused by name."""

from __future__ import annotations

import pytest

from tests.slow import slow
from tests.trainer.batches import empty_loader_ranks as ranks


@pytest.mark.parametrize("groups", [2, *slow(1)])
def test_an_empty_evaluation_is_left_out(pools, groups):
    [plain] = pools(1).run(ranks.run, 0, 1)
    for found in pools(2).run(ranks.run, 2, groups):
        assert found["metrics"] == pytest.approx(plain["metrics"], rel=1e-10)
        assert found["predicted"] == plain["predicted"]
        assert found["said"].startswith("a sampler needs at least 1 sample, got 0: the data set of a loader is empty")
