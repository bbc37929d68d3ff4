"""The law: sharded attention equals the plain reference, output and every gradient, float64 to 1e-10."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_sp.attention import AttentionMask, boundaries_from_lengths
from lightning_sp.attention.balance import balance
from lightning_sp.layout import SequenceLayout
from lightning_sp.testing import assert_sharded_equals_unsharded
from tests import layouts, masks
from tests.dist.attention_ranks import law_case, whole

NAMES = ("out", "dq", "dk", "dv", "dsinks")
HEADS = [(8, 8), (8, 2), (8, 1), (6, 2)]
DEGREES = {1: [(1, 1)], 2: [(1, 2), (2, 1)], 4: [(2, 2), (4, 1), (1, 4)]}
# What changes the scores; the attention of Gemma 2, GPT-OSS and DeepSeek has some of them.
SCORES = [dict(with_sinks=True), dict(softcap=0.7), dict(dim_v=5), dict(dim_v=11, with_sinks=True, softcap=1.3, scale=0.4)]
# Every mask with heads that share keys unevenly; every head count with four masks; every change of the scores with four.
CASES = [
    *(((6, 2), name, {}) for name in masks.NAMED),
    *((heads, name, {}) for heads in HEADS for name in ("causal", "full", "packed", "window left")),
    *(((6, 2), name, more) for more in SCORES for name in ("causal", "padding left", "all together", "a row of padding")),
]


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("length", [32, 37])  # every degree divides the one, none the other
def test_law(pools, world, length):
    cases = [
        dict(ulysses=u, ring=r, heads=heads[0], kv_heads=heads[1], length=length, mask=stretched(name, length), **more)
        for (u, r), (heads, name, more) in itertools.product(DEGREES[world], CASES)
    ]
    answers = pools(world).run(law_case, cases)
    expected = {}
    for i, case in enumerate(cases):
        alone = {n: v for n, v in case.items() if n not in ("ulysses", "ring")}
        if str(alone) not in expected:
            expected[str(alone)] = whole(**alone)
        for rank in range(world):
            labels = [f"{case} rank {rank} {n}" for n in NAMES[: len(answers[rank][i])]]
            assert_sharded_equals_unsharded(answers[rank][i], expected[str(alone)], labels)


def stretched(name, length):
    """Return a named mask, made for 32 tokens, for `length`: its documents end with the sequence."""
    options = dict(masks.NAMED[name])
    if "lengths" in options:
        options["lengths"] = [[*row[:-1], row[-1] + length - 32] for row in options["lengths"]]
    return options


@settings(
    max_examples=settings().max_examples // 4,  # each runs on all ranks
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(
    length=st.integers(1, 150),
    degrees=st.sampled_from([(2, 2), (4, 1), (1, 4)]),
    heads=st.sampled_from([*HEADS, (5, 5), (4, 2)]),
    data=st.data(),
)
def test_law_for_drawn_masks(pools, length, degrees, heads, data):
    mask, more = data.draw(masks.drawn(length)), data.draw(st.sampled_from([{}, {}, *SCORES]))
    case = dict(ulysses=degrees[0], ring=degrees[1], heads=heads[0], kv_heads=heads[1], length=length, mask=mask, **more)
    expected = whole(**{n: v for n, v in case.items() if n not in ("ulysses", "ring")})
    for rank, answer in enumerate(pools(4).run(law_case, [case])):
        labels = [f"{case} rank {rank} {n}" for n in NAMES[: len(expected)]]
        assert_sharded_equals_unsharded(answer[0], expected, labels)


@settings(
    max_examples=settings().max_examples // 4,  # each runs on all ranks
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(
    length=st.integers(1, 150),
    degrees=st.sampled_from([(2, 2), (1, 4)]),
    heads=st.sampled_from([*HEADS, (5, 5), (4, 2)]),
    data=st.data(),
)
def test_law_for_drawn_layouts(pools, length, degrees, heads, data):
    """Each rank may hold any ranges of tokens, as many as the others."""
    mask, more = data.draw(masks.drawn(length)), data.draw(st.sampled_from([{}, {}, *SCORES]))
    alone = dict(heads=heads[0], kv_heads=heads[1], length=length, mask=mask, **more)
    padded = SequenceLayout(degrees[1], degrees[0]).padded_length(length)
    layout = data.draw(layouts.drawn(degrees[1], degrees[0], padded))
    case, expected = dict(ulysses=degrees[0], ring=degrees[1], layout=layout, **alone), whole(**alone)
    for rank, answer in enumerate(pools(4).run(law_case, [case])):
        labels = [f"{case} rank {rank} {n}" for n in NAMES[: len(expected)]]
        assert_sharded_equals_unsharded(answer[0], expected, labels)


@pytest.mark.parametrize("degrees", [(1, 4), (2, 2)], ids=["1x4", "2x2"])
def test_law_for_balanced_documents(pools, degrees):
    """What the search finds, for rows of other documents each, with what changes the scores, windows and padding."""
    lengths = [[130, 60, 2, 40, 24], [17, 200, 39]]
    mask = AttentionMask(boundaries=boundaries_from_lengths(lengths))
    layout = balance([mask], SequenceLayout(degrees[1], degrees[0]), 256).layout
    assert layout.assignment
    cases = [
        dict(ulysses=degrees[0], ring=degrees[1], layout=layout, heads=8, kv_heads=2, length=256, mask=mask, **more)
        for mask, more in (
            *((dict(lengths=lengths), more) for more in ({}, *SCORES)),
            (dict(lengths=lengths, window_size=(50, None)), {}),
            (dict(lengths=lengths, causal=False), {}),
        )
    ]
    answers = pools(4).run(law_case, cases)
    for i, case in enumerate(cases):
        expected = whole(**{n: v for n, v in case.items() if n not in ("ulysses", "ring", "layout")})
        for rank in range(4):
            labels = [f"{case} rank {rank} {n}" for n in NAMES[: len(expected)]]
            assert_sharded_equals_unsharded(answers[rank][i], expected, labels)


def test_an_explicit_scale_is_used(pools):
    case = dict(heads=4, kv_heads=2, length=32, mask={}, scale=0.7)
    expected = whole(**case)
    other = whole(**{**case, "scale": None})
    assert (expected[0] - other[0]).abs().max() > 1e-3
    for answer in pools(4).run(law_case, [dict(ulysses=2, ring=2, **case)]):
        assert_sharded_equals_unsharded(answer[0], expected, NAMES[:4])
