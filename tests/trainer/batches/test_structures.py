"""Batches that are dataclasses, named tuples, objects, or nested train as on one device, and reach the step in their own classes."""

from __future__ import annotations

import pytest

from lightning_sp.testing import max_error
from tests.trainer.batches import structure_ranks as ranks


def hold(pools, strategy, world, cases, micro=4):
    alone = pools(1).run(ranks.runs, [dict(strategy=None, world=1, micro=micro, **case) for case in cases])[0]
    dp = strategy.get("data_parallel_size", 1)
    given = [dict(strategy=strategy, world=world, micro=micro // dp, **case) for case in cases]
    for answers in pools(world).run(ranks.runs, given):
        for case, actual, expected in zip(cases, answers, alone, strict=True):
            assert not actual["error"], (case, actual["error"])
            assert actual["losses"] == pytest.approx(expected["losses"], abs=1e-10), case
            assert actual["logged"] == pytest.approx(expected["logged"], abs=1e-10), case
            assert expected["kinds"] - {"dict"} <= actual["kinds"], case
            assert max_error(actual["predicted"], expected["predicted"]) < 1e-10, case
            for name, weight in expected["weights"].items():
                assert max_error(actual["weights"][name], weight) < 1e-10, (case, name)


CASES = [
    *(dict(structure=name) for name in ranks.STRUCTURES),
    dict(structure="own", dims={"tokens_in": 1, "places": 1, "tokens_out": 1}),
    dict(structure="list", dims={"x.0": 1, "x.1": 1, "y": 1}),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        dict(ring_size=2),
        dict(ulysses_size=2, global_view=True),
    ],
    ids=str,
)
def test_a_structure_trains_as_on_one_device(pools, strategy):
    hold(pools, strategy, 2, CASES)


@pytest.mark.slow
def test_it_does_beside_data_parallel_groups(pools):
    hold(pools, dict(data_parallel_size=2, ring_size=2), 4, CASES)
