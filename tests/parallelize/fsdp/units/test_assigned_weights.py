"""Whole weights that a step gives other memory, `follower.data = ...`: the trial puts them back, and each step sees what the one before left."""

from __future__ import annotations

import pytest

from lightning_sp.testing import max_error
from tests.parallelize.fsdp.units import assigned_weights_ranks as ranks


def test_weights_that_follow_by_assignment_train_as_on_one_device(pools):
    losses, weights = pools(1).run(ranks.fit, 1, None)[0]
    for actual, found in pools(2).run(ranks.fit, 2, dict(ring_size=2)):
        assert actual == pytest.approx(losses, abs=1e-10)
        assert max(max_error(found[name], each) for name, each in weights.items()) < 1e-10
