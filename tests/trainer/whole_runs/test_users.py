"""What users write in their own way trains as on one device under plain Lightning, or is refused."""

from __future__ import annotations

import pytest

from lightning_sp.testing import max_error
from tests.trainer.whole_runs import user_ranks as ranks

CASES = [
    dict(kind="written"),
    dict(kind="written, tied"),
    dict(kind="written, functional"),
    dict(kind="written, drop_last"),
    dict(kind="other index"),  # the last batch is short
    dict(kind="other index", length=29),  # and padded
    dict(kind="counted"),
    dict(kind="shared part"),
    dict(kind="shared block"),
    dict(kind="object"),
    dict(kind="joined view"),
    dict(kind="taken view"),
]
# Of each way to write a module and a loader one; Ulysses runs all.
USUAL = ("written", "written, tied", "counted", "shared block", "object", "taken view")
FEW = [case for case in CASES if case["kind"] in USUAL or "length" in case]


def same(actual, expected, case):
    assert not actual["error"], (case, actual["error"])
    assert actual["steps"] == expected["steps"] > 0, case
    assert actual["losses"] == pytest.approx(expected["losses"], abs=1e-12), case
    for name, weight in expected["weights"].items():
        assert max_error(actual["weights"][name], weight) < 1e-10, (case, name)


@pytest.mark.parametrize(
    ("strategy", "cases"),
    [
        pytest.param(dict(ring_size=2), FEW, id="{'ring_size': 2}"),
        pytest.param(
            dict(ring_size=2),
            [case for case in CASES if case not in FEW],
            id="{'ring_size': 2}, more",
            marks=pytest.mark.slow,
        ),
        pytest.param(dict(ulysses_size=2), CASES, id="{'ulysses_size': 2}", marks=pytest.mark.slow),
    ],
)
def test_a_users_module_trains_as_on_one_device(pools, strategy, cases):
    alone = pools(1).run(ranks.runs, [dict(strategy=None, world=1, **case) for case in cases])[0]
    for answers in pools(2).run(ranks.runs, [dict(strategy=strategy, world=2, **case) for case in cases]):
        for case, actual, expected in zip(cases, answers, alone, strict=True):
            same(actual, expected, case)


@pytest.mark.parametrize("ring_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_what_keeps_other_groups_company_counts_for_nothing(pools, ring_size):
    """Five samples in fours: in the last batch a data-parallel rank has none."""
    cases = [dict(kind="counted"), dict(kind="other index")]
    alone = pools(1).run(ranks.runs, [dict(strategy=None, world=1, micro=4, **case) for case in cases])[0]
    world, strategy = 2 * ring_size, dict(data_parallel_size=2, ring_size=ring_size)
    runs = [dict(strategy=strategy, world=world, micro=2, **case) for case in cases]
    for answers in pools(world).run(ranks.runs, runs):
        for case, actual, expected in zip(cases, answers, alone, strict=True):
            same(actual, expected, case)


@pytest.mark.parametrize("preflight", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_experts_that_some_ranks_have_no_token_for_train_as_on_one_device(pools, preflight):
    """From the second batch on each rank has tokens for one expert; a third expert never has any, and AdamW leaves it as it is."""
    alone = pools(1).run(ranks.runs, [dict(kind="experts", strategy=None, world=1, size=6)])[0][0]
    strategy = dict(ulysses_size=2, preflight=preflight)
    for answers in pools(2).run(ranks.runs, [dict(kind="experts", strategy=strategy, world=2, size=6)]):
        same(answers[0], alone, preflight)
