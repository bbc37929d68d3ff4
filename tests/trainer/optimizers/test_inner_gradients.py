"""Gradients that a step asks for by itself, and modules called with other weights, are one device's."""

from __future__ import annotations

import pytest

from tests.trainer.optimizers import inner_gradients_ranks as ranks
from tests.trainer.optimizers.test_penalties import same

CASES = [dict(step=name) for name in (*ranks.STEPS, "by_hand", "weighed_by_hand")]
# A gradient penalty and its second derivative, a gradient of embeddings, of hidden states and of weights, rows by number, and other weights
# in a module.
USUAL = (
    "penalty",
    "fast_gradient",
    "of_weights",
    "of_states_twice",
    "first_rows",
    "first_order",
    "by_hand",
)


def hold(pools, strategy, world, cases):
    alone = pools(1).run(ranks.runs, [dict(strategy=None, world=1, **case) for case in cases])[0]
    for answers in pools(world).run(ranks.runs, [dict(strategy=strategy, world=world, **case) for case in cases]):
        for case, actual, expected in zip(cases, answers, alone, strict=True):
            same(actual, expected, case)


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param([case for case in CASES if case["step"] in USUAL], id="most"),
        pytest.param([case for case in CASES if case["step"] not in USUAL], id="more", marks=pytest.mark.slow),
    ],
)
def test_what_a_step_asks_for_is_one_devices(pools, cases):
    hold(pools, dict(ring_size=2), 2, cases)


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy", [dict(ulysses_size=2), dict(ring_size=2, global_view=True), dict(ring_size=2, shard_size=1)], ids=str
)
def test_it_is_in_other_layouts(pools, strategy):
    hold(pools, strategy, 2, CASES)
