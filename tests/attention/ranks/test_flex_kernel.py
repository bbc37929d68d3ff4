"""The law by FlexAttention as the local kernel: within the operator, on a ring and beside Ulysses, for all that changes scores."""

from __future__ import annotations

import pytest

from lightning_sp.testing import assert_sharded_equals_unsharded
from tests.attention.ranks.attention_ranks import whole
from tests.attention.ranks.flex_ranks import flex_law
from tests.attention.ranks.test_law import NAMES
from tests.drawn_cases import masks

RING, ULYSSES = dict(ulysses=1, ring=2), dict(ulysses=2, ring=1)
# What learns (a bias, slopes) has its gradient by the tiled kernel, from an out and lse of FlexAttention's.
CASES = [
    dict(mask=masks.NAMED["dense over a window"], with_sinks=True),
    dict(mask=masks.NAMED["a function over packed"]),
    dict(mask=masks.NAMED["blocks chosen by hand"], dim_v=5),
    dict(mask=masks.CROSS["cross a function"], keys=21),
    dict(mask=masks.NAMED["causal"], bias="of heads", score_mod="bends"),
]


def hold_the_law(pools, cases):
    cases = [dict(heads=6, kv_heads=2, length=32, **case) for case in cases]
    for rank, (answers, num_calls) in enumerate(pools(2).run(flex_law, cases)):
        assert num_calls >= len(cases)
        for case, [answer] in zip(cases, answers, strict=True):
            expected = whole(**{n: v for n, v in case.items() if n not in ("ulysses", "ring")})
            labels = [f"{case} rank {rank} {n}" for n in NAMES[: len(expected)]]
            assert_sharded_equals_unsharded(answer, expected, labels)


@pytest.mark.slow
def test_law_by_flex(pools):
    hold_the_law(pools, [dict(mask=masks.NAMED["a function"], softcap=0.7, **RING)])


@pytest.mark.slow
@pytest.mark.parametrize("degrees", [RING, ULYSSES], ids=["ring", "ulysses"])
@pytest.mark.parametrize("case", CASES, ids=["dense", "function", "chosen", "cross", "learned"])
def test_law_by_flex_for_all_changes(pools, case, degrees):
    hold_the_law(pools, [{**case, **degrees}])
