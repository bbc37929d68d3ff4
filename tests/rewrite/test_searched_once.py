"""What a mask hides is searched for once in a step, and again wherever it may be another."""

from __future__ import annotations

import pytest

from lightning_sp.testing import max_error
from tests.rewrite import searched_ranks as ranks
from tests.slow import slow

# Of a step.
SEARCHES = {
    "shared": 1,
    "matrix": 1,
    "of each layer": ranks.LAYERS,
    "matrix of each layer": ranks.LAYERS,
    "by an object": 1,
}


@pytest.mark.parametrize("kind", ["shared", "matrix", "of each layer", *slow("matrix of each layer", "by an object")])
def test_layers_that_share_a_mask_search_it_once_and_gradients_are_one_devices(pools, kind):
    [(alone, _)] = pools(1).run(ranks.fit, kind, None)
    for grads, searches in pools(2).run(ranks.fit, kind, {"ring_size": 2}):
        assert searches == 2 * SEARCHES[kind]
        for name, grad in alone.items():
            assert max_error(grads[name], grad) < 1e-10, name


@pytest.mark.parametrize("kind", ["written", "changed"])
def test_a_function_that_says_something_else_in_the_backward_is_refused(pools, kind):
    for message in pools(2).run(ranks.refused, kind, {"ring_size": 2}):
        assert message.startswith(
            "an attention's mask_mod reads a number or a tensor that was changed between its forward and"
        ), message
