"""A backward of the user's own that clips gradients is refused before the first step, though none is large enough yet."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tests.preflight.differences import large_gradients_ranks as ranks
from tests.slow import slow


@pytest.mark.parametrize(
    ("kind", "has"),
    [
        ("function", "the autograd.Function Clipped"),
        ("hook", "a hook at large_gradients_ranks.py:"),
        *slow(("largest", "a hook at large_gradients_ranks.py:")),
    ],
)
def test_a_backward_that_clips_is_refused_though_no_gradient_is_large_yet(pools: Any, kind: str, has: str):
    for error, steps in pools(2).run(ranks.fit, kind):
        assert "training_step does not pass gradients on in proportion: on a crop of 2 x 32 tokens" in error
        assert f"It has {has}" in error
        assert "in on_before_optimizer_step, which are one device's" in error
        assert steps == 0


@pytest.mark.parametrize(
    ("kind", "has"),
    [("function", "the autograd.Function Clipped"), *slow(("hook", "a hook at large_gradients_ranks.py:"))],
)
def test_so_it_is_where_the_step_goes_backward_by_itself(pools: Any, kind: str, has: str):
    for error, steps in pools(2).run(partial(ranks.fit, by_hand=True), kind):
        assert f"It has {has}" in error
        assert "(with manual optimization behind self.manual_backward)" in error
        assert steps == 0


def test_between_backwards_the_gradients_of_parameters_may_be_clipped(pools: Any):
    assert pools(2).run(partial(ranks.fit, by_hand=True, view=False), "linear") == [("", 1)] * 2


def test_one_that_passes_them_on_in_proportion_trains(pools: Any):
    assert pools(2).run(ranks.fit, "linear") == [("", 1)] * 2
