"""Under autocast a difference that rounding alone makes is told from a fault by the same step in float32."""

from __future__ import annotations

from typing import Any

import pytest

from tests.preflight import rounding_ranks as ranks

pytest.importorskip("transformers")
pytest.importorskip("datasets")


def test_a_neuron_that_rounding_switches_is_no_false_alarm(pools: Any):
    for found in pools(2).run(ranks.said, "models", "t5_translation"):
        assert found == {"outcome": "ran"}


@pytest.mark.parametrize("factor", [1.3, 0.5])
def test_what_is_wrong_in_bfloat16_alone_is_refused(pools: Any, factor: float):
    for found in pools(2).run(ranks.said, "models", "t5_translation", factor):
        assert found["outcome"] == "refused"
        assert "gives another result on shards than whole (allowed: 8e-02 relative)" in found["why"]
