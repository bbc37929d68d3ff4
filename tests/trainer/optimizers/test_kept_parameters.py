"""Weights that a module has kept from its `__init__` are those that are trained."""

from __future__ import annotations

import pytest

from tests.trainer.optimizers import kept_parameters_ranks as ranks


def test_what_is_made_of_weights_in_init_has_the_trained_ones(pools):
    """A penalty of the first weights alone, in a function, had no gradient, without a word; an optimizer was refused."""
    plain, averages, numbers = ranks.fit(1)
    for weights, averaged, found in pools(2).run(ranks.fit, 2):
        for one, other in zip((*plain, *averages), (*weights, *averaged), strict=True):
            assert (one - other).abs().max() <= 1e-10
        assert found == pytest.approx(numbers, rel=1e-10)
