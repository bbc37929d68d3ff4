"""Before the first prediction: what the step returns for whole sequences is what one device returns, or it is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lightning_sp.preflight.evaluation.outputs import leaves, output_differences
from tests.preflight.evaluation import prediction_ranks as ranks
from tests.slow import slow

MOVED = torch.arange(200).clamp(min=1)
LAYOUTS = [
    (2, dict(ring_size=2)),
    pytest.param(2, dict(ulysses_size=2), marks=pytest.mark.slow),
    (4, dict(data_parallel_size=2, ring_size=2)),
]


@pytest.mark.parametrize(
    ("kind", "world", "strategy"),
    [
        ("logits", 2, dict(ring_size=2)),
        ("pooled", 4, dict(data_parallel_size=2, ring_size=2)),
        *slow(("pooled", 2, dict(ring_size=2)), ("logits", 4, dict(data_parallel_size=2, ring_size=2))),
        *slow(("logits", 2, dict(ulysses_size=2)), ("pooled", 2, dict(ulysses_size=2))),
    ],
    ids=str,
)
def test_right_predictions_are_returned_without_a_word(pools: Any, kind: str, world: int, strategy: dict[str, int]):
    (one,) = pools(1).run(ranks.predicted, kind, 1, {})
    rows = torch.cat([leaves(each)[0].value for each in one["outputs"]])
    for found in pools(world).run(ranks.predicted, kind, world, strategy):
        assert (found["error"], found["said"]) == ("", [])
        torch.testing.assert_close(torch.cat([leaves(each)[0].value for each in found["outputs"]]), rows)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("positions of its own", "output 0 of 1 (2, 31, 61): differs by"),
        ("text", "output 0 of 2: '"),
        ("number of tokens", "output 0 of 1: 1 of its 1 elements differ"),
        ("number of tokens, later", "output 1 of 2: 1 of its 1 elements differ"),
    ],
)
def test_what_a_shard_makes_is_refused_on_all_ranks(pools: Any, kind: str, words: str):
    for found in pools(2).run(ranks.predicted, kind, 2, dict(ring_size=2)):
        assert found["error"].startswith("preflight: predict_step on a crop of 2 x "), found["error"]
        assert words in found["error"]


def test_what_is_drawn_is_not_judged_and_the_switch_works(pools: Any):
    for found in pools(2).run(ranks.predicted, "drawn", 2, dict(ring_size=2)):
        assert found["error"] == ""
    for found in pools(2).run(ranks.predicted, "positions of its own", 2, dict(ring_size=2, preflight=False)):
        assert found["error"] == ""


@pytest.mark.parametrize(
    ("shown", "wanted", "again", "words"),
    [
        ([torch.ones(3)], [torch.ones(3)], [torch.ones(3)], []),
        ([torch.ones(3)], [2 * torch.ones(3)], [2 * torch.ones(3)], ["output 0 of 1 (3,): differs by 5.0e-01"]),
        ([torch.ones(3)], [torch.ones(4)], [torch.ones(4)], ["output 0 of 1 (4,): shape (3,), on one device (4,)"]),
        ([torch.arange(200)], [MOVED], [MOVED], ["output 0 of 1 (200,): 1 of its 200 elements differ"]),
        # What is drawn in few places is judged in the others.
        ([torch.arange(200)], [MOVED], [torch.arange(200)], []),
        ([{1: 2}], [{3: 2}], [{3: 2}], ["output 0 of 1 as '0.1', on one device '0.3'"]),
        ([{4, 5}], [{4, 6}], [{4, 6}], ["output 1 of 2: 1 of its 1 elements differ"]),
        ([np.array(["a"])], [np.array(["b"])], [np.array(["b"])], ["output 0 of 1 (1,): texts of it differ"]),
        ([1, "a"], [1, "b"], [1, "b"], ["output 1 of 2: 'a' is on one device 'b'"]),
        ([1, "a"], [1, "b"], [1, "c"], []),
        ([1], [1, 2], [1, 2], ["1 tensors, numbers and texts, on one device 2"]),
        ([torch.tensor(float("nan"))], [torch.tensor(float("nan"))], [torch.tensor(float("nan"))], []),
    ],
)
def test_what_differs(shown: list[Any], wanted: list[Any], again: list[Any], words: list[str]):
    found = output_differences(leaves(shown), leaves(wanted), leaves(again), tolerance=1e-3)
    assert len(found) == len(words), found
    assert all(each.startswith(part) for each, part in zip(found, words, strict=True)), found


def test_what_rounding_moves_may_differ_in_its_place_alone():
    shown, wanted = leaves(torch.arange(200)), leaves(MOVED)
    assert output_differences(shown, wanted, wanted, tolerance=1e-3, few=0.01) == []
    assert output_differences(shown, wanted, wanted, tolerance=1e-3, moved=[wanted, shown]) == []
    assert output_differences(shown, wanted, wanted, tolerance=1e-3, moved=[wanted])
