"""What a user notes on a weight (`_no_weight_decay`) is on it in a run, for its optimizer and in a forward."""

from __future__ import annotations

import pytest

from tests.trainer.optimizers import noted_parameters_ranks as ranks


@pytest.mark.parametrize("late", [False, True], ids=["__init__", "configure_model"])
def test_attributes_of_a_weight_stay_on_it(pools, late):
    """An optimizer that finds its groups by them decayed what it was not to decay, and a second run's, too."""
    plain, groups = ranks.fit(1, late)
    assert groups == [1, 1]
    for weights, found in pools(2).run(ranks.fit, 2, late):
        assert found == groups
        for name, each in plain.items():
            assert (weights[name] - each).abs().max() <= 1e-10, name
