"""The law: sharded attention equals the plain reference, output and every gradient, float64 to 1e-10."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_sp.testing import assert_sharded_equals_unsharded
from tests.dist.attention_ranks import law_case, whole

NAMES = ("out", "dq", "dk", "dv")
HEADS = [(8, 8), (8, 2), (8, 1), (6, 2)]
DEGREES = {1: [(1, 1)], 2: [(1, 2), (2, 1)], 4: [(2, 2), (4, 1), (1, 4)]}
# 32 divides by every degree; 37 by none, so it is padded. Packed rows differ and cross every chunk edge.
LENGTHS = [(32, None), (37, None), (32, [[5, 20, 7], [32]]), (37, [[1, 1, 30, 5], [13, 24]])]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_law(pools, world):
    cases = [
        dict(ulysses=u, ring=r, heads=h, kv_heads=k, length=s, causal=causal, lengths=docs)
        for (u, r), (h, k), (s, docs), causal in itertools.product(DEGREES[world], HEADS, LENGTHS, (True, False))
    ]
    answers = pools(world).run(law_case, cases)
    for i, case in enumerate(cases):
        expected = whole(**{n: v for n, v in case.items() if n not in ("ulysses", "ring")})
        for rank in range(world):
            assert_sharded_equals_unsharded(answers[rank][i], expected, [f"{case} rank {rank} {n}" for n in NAMES])


@settings(
    max_examples=settings().max_examples // 6,  # each runs on all ranks
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    documents=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    degrees=st.sampled_from([(2, 2), (4, 1), (1, 4)]),
    heads=st.sampled_from([*HEADS, (5, 5), (4, 2)]),
    causal=st.booleans(),
)
def test_law_for_drawn_documents(pools, documents, degrees, heads, causal):
    total = sum(documents)
    case = dict(ulysses=degrees[0], ring=degrees[1], heads=heads[0], kv_heads=heads[1], length=total, causal=causal)
    case["lengths"] = [documents, list(reversed(documents))]
    expected = whole(**{n: v for n, v in case.items() if n not in ("ulysses", "ring")})
    for rank, answer in enumerate(pools(4).run(law_case, [case])):
        assert_sharded_equals_unsharded(answer[0], expected, [f"{case} rank {rank} {n}" for n in NAMES])


def test_an_explicit_scale_is_used(pools):
    case = dict(heads=4, kv_heads=2, length=32, causal=True, scale=0.7)
    expected = whole(**case)
    other = whole(**{**case, "scale": None})
    assert (expected[0] - other[0]).abs().max() > 1e-3
    for answer in pools(4).run(law_case, [dict(ulysses=2, ring=2, **case)]):
        assert_sharded_equals_unsharded(answer[0], expected, NAMES)
