"""Logits that wait are those of the weights of their forward, whenever a step of manual optimization reads them."""

from __future__ import annotations

import pytest

from lightning_sp.testing import max_error
from tests.loss.output_head import later_logits_ranks as ranks


@pytest.mark.parametrize(
    "strategy",
    [{"ulysses_size": 2}, pytest.param({"ring_size": 2, "global_view": True}, marks=pytest.mark.slow)],
    ids=["part", "global view"],
)
def test_logits_read_behind_a_backward_and_a_step_are_those_of_before(pools, strategy):
    [alone] = pools(1).run(ranks.fit, 1, None)
    for found in pools(2).run(ranks.fit, 2, strategy):
        for name, value in alone.items():
            assert max_error(found[name], value) < 1e-10, name
