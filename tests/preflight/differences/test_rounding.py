"""Under autocast a difference that rounding alone makes is told from a fault by the same step in float32."""

from __future__ import annotations

from typing import Any

import pytest

from tests.preflight.differences import rounding_ranks as ranks
from tools.models import ranks as models
from tools.models.batches import Trial
from tools.models.registry import entries

pytest.importorskip("transformers")
pytest.importorskip("datasets")


@pytest.mark.slow
def test_a_neuron_that_rounding_switches_is_no_false_alarm(pools: Any):
    for found in pools(2).run(ranks.said, "models", "t5_translation"):
        assert found == {"outcome": "ran"}


@pytest.mark.slow
def test_a_token_that_rounding_sends_to_another_expert_is_no_false_alarm(pools: Any):
    (case,) = [each for each in entries() if each.model_type == "jetmoe"]
    for found in pools(2).run(models.alarm, Trial.of(case, "own loss"), "1x2", "bf16-mixed"):
        assert found == {"outcome": "ran"}


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1.3, 0.5])
def test_what_is_wrong_in_bfloat16_alone_is_refused(pools: Any, factor: float):
    for found in pools(2).run(ranks.said, "models", "t5_translation", factor):
        assert found["outcome"] == "refused"
        assert "gives another result on shards than whole (allowed: 8e-02 relative)" in found["why"]


@pytest.mark.parametrize("rows", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_gradients_that_are_what_rounding_leaves_of_0_are_no_difference(pools: Any, rows: int):
    assert pools(2).run(ranks.fit, "relational", rows) == ["", ""]


def test_a_small_loss_that_is_wrong_is_refused(pools: Any):
    for found in pools(2).run(ranks.fit, "small", 2):
        assert (
            "gives another result on shards than whole (allowed: 1e-08 relative)" in found or "differs between" in found
        )
