"""Drawn models are exact at each layout, some of those that `make drawn` tries by the hundred; and one seed is one model."""

from __future__ import annotations

import pytest

from tools.drawn_models.__main__ import LAYOUTS
from tools.drawn_models.flow import DrawnFlow, drawn_rows
from tools.drawn_models.operations import OPERATIONS
from tools.flows import ranks


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "layout"), [(1, LAYOUTS[0]), (2, LAYOUTS[1]), (5, LAYOUTS[2])])
def test_a_drawn_model_is_exact(pools, tmp_path, seed, layout):
    flow = DrawnFlow(seed)
    (reference,) = pools(1).run(ranks.reference, flow, str(tmp_path))
    assert reference == {"outcome": "ran"}
    answers = pools(ranks.LAYOUTS[layout][0]).run(ranks.sharded, flow, layout, str(tmp_path))
    assert {each["outcome"] for each in answers} == {"exact"}, answers


def test_a_seed_is_one_model_and_its_rows_and_all_operations_are_drawn():
    assert DrawnFlow(3).title == DrawnFlow(3).title
    assert all(a["input_ids"].equal(b["input_ids"]) for a, b in zip(drawn_rows(3), drawn_rows(3), strict=True))
    drawn = {name for seed in range(400) for name in DrawnFlow(seed).title.rpartition(" -> ")[0].split(", ")}
    assert drawn == OPERATIONS.keys()
