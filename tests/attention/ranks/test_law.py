"""The law: sharded attention equals the plain reference, output and every gradient, float64 to 1e-10."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_sp.attention import AttentionMask, boundaries_from_lengths
from lightning_sp.attention.plan.balance import balance
from lightning_sp.layout import SequenceLayout
from lightning_sp.testing import assert_sharded_equals_unsharded
from tests.attention.ranks.attention_ranks import BIASES, SCORE_MODS, law_case, whole
from tests.drawn_cases import layouts, masks
from tests.drawn_cases.covering import covering

NAMES = ("out", "dq", "dk", "dv", "of what learns", "of what learns next", "of what learns third")
HEADS = [(8, 8), (8, 2), (8, 1), (6, 2)]
DEGREES = {1: [(1, 1)], 2: [(1, 2), (2, 1)], 4: [(2, 2), (4, 1), (1, 4)]}
# By which keys and values reach the ranks of a ring; where there is none, there is nothing to choose.
TRANSPORTS = ("network", "network+saved", "shared_memory")
METHODS = ("hops", "all_gather")
# What changes the scores; the attention of Gemma 2, GPT-OSS and DeepSeek has some of them.
SCORES = [
    dict(with_sinks=True),
    dict(softcap=0.7),
    dict(dim_v=5),
    dict(dim_v=11, with_sinks=True, softcap=1.3, scale=0.4),
]
# What learns, hides or drops among them: the T5, ALiBi, Bloom, Flex and dropout of models, alone and with all the rest.
LEARNED = [
    *(dict(bias=name) for name in BIASES),
    *(dict(score_mod=name) for name in SCORE_MODS),
    dict(dropout=0.3),
    dict(bias="of heads", score_mod="bends", dropout=0.2, softcap=0.9, with_sinks=True, dim_v=5),
]
# Every mask with heads that share keys unevenly; every head count with four masks; every change of the scores with four.
CASES = [
    *(((6, 2), name, {}) for name in masks.NAMED),
    *((heads, name, {}) for heads in HEADS for name in ("causal", "full", "packed", "window left")),
    *(
        ((6, 2), name, more)
        for more in SCORES
        for name in ("causal", "padding left", "all together", "a row of padding")
    ),
    *(((6, 2), name, more) for more in LEARNED for name in ("causal", "packed", "dense over a window")),
    *(((6, 2), name, dict(keys=21)) for name in masks.CROSS),
    *(
        ((8, 2), "cross dense", dict(keys=21, **more))
        for more in (dict(bias="whole"), dict(score_mod="t5", dropout=0.3))
    ),
]


def product(world, length):
    """Return every case under every scheme of a world; one head count and its masks by every transport and method."""
    rows = []
    for (ulysses, ring), (heads, name, more) in itertools.product(DEGREES[world], CASES):
        case = dict(ulysses=ulysses, ring=ring, heads=heads[0], kv_heads=heads[1], length=length)
        case |= dict(mask=stretched(name, length), **more)
        axes = dict(degrees=(ulysses, ring), heads=heads, mask=name, scores=str(more))
        for transport, method in itertools.product(TRANSPORTS, METHODS) if ring > 1 else [("network", "hops")]:
            if heads == (6, 2) or (transport, method) == ("network", "hops"):
                ways = dict(transport=transport, method=method)
                rows.append((axes | (ways if ring > 1 else {}), case | ways))
    return rows


def hold_the_law(pools, world, cases):
    answers = pools(world).run(law_case, cases)
    expected = {}
    for i, case in enumerate(cases):
        alone = {n: v for n, v in case.items() if n not in ("ulysses", "ring", "transport", "method", "stages")}
        if str(alone) not in expected:
            expected[str(alone)] = whole(**alone)
        for rank in range(world):
            labels = [f"{case} rank {rank} {n}" for n in NAMES[: len(answers[rank][i])]]
            assert_sharded_equals_unsharded(answers[rank][i], expected[str(alone)], labels)


@pytest.mark.parametrize(
    ("length", "world"),  # every degree divides the one length, none the other
    [(32, 1), (32, 2), (32, 4), (37, 1), (37, 2), pytest.param(37, 4, marks=pytest.mark.slow)],
)
def test_law(pools, world, length):
    """Every pair of mask, heads, change of the scores, degrees, transport and method; of padded sequences every mask at all degrees.

    Of what else there is they have each value: `test_law_for_drawn_masks` draws lengths and all the rest.
    """
    rows = product(world, length)
    every = [axes for axes, _ in rows]
    if length == 37:
        every = [{**axes, "mask": (axes["mask"], axes["degrees"])} for axes in every]
    hold_the_law(pools, world, [rows[i][1] for i in covering(every, num_axes=1 if length == 37 else 2)])


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("length", [32, 37])
def test_law_of_the_whole_product(pools, world, length):
    cases = [case for _, case in product(world, length)]
    for start in range(0, len(cases), 400):  # a pool's time limit is for a call
        hold_the_law(pools, world, cases[start : start + 400])


@pytest.mark.slow
def test_law_on_eight_ranks(pools):
    chosen = [
        ((8, 2), "packed", {}), ((8, 8), "causal", dict(with_sinks=True)), ((9, 3), "all together", {}),
        ((8, 2), "dense over a window", LEARNED[-1]), ((9, 3), "cross packed", dict(keys=21)),
    ]  # fmt: skip
    cases = [
        dict(ulysses=u, ring=r, heads=heads[0], kv_heads=heads[1], length=37, mask=stretched(name, 37), **more)
        for (u, r), (heads, name, more) in itertools.product([(8, 1), (1, 8), (2, 4), (4, 2)], chosen)
    ]
    for case in [case for case in cases if case["ring"] > 1][::2]:
        case["method"] = "all_gather"
    for i, answers in enumerate(zip(*pools(8).run(law_case, cases), strict=True)):
        expected = whole(**{n: v for n, v in cases[i].items() if n not in ("ulysses", "ring", "method")})
        for rank, answer in enumerate(answers):
            labels = [f"{cases[i]} rank {rank} {n}" for n in NAMES[: len(answer)]]
            assert_sharded_equals_unsharded(answer, expected, labels)


def stretched(name, length):
    """Return a named mask, made for 32 tokens, for `length`: its documents end with the sequence."""
    options = dict({**masks.NAMED, **masks.CROSS}[name])
    if "lengths" in options:
        options["lengths"] = [[*row[:-1], row[-1] + length - 32] for row in options["lengths"]]
    return options


def changes(length):
    """Draw what changes the scores; a bias of one key is refused where the sequence is padded."""
    return st.sampled_from([{}, {}, *SCORES, *(more for more in LEARNED if length > 1 or "bias" not in more)])


ON_RANKS = settings(
    max_examples=settings().max_examples // 4,  # each runs on all ranks
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.mark.slow
@ON_RANKS
@given(
    length=st.integers(1, 150),
    degrees=st.sampled_from([(2, 2), (4, 1), (1, 4)]),
    heads=st.sampled_from([*HEADS, (5, 5), (4, 2)]),
    transport=st.sampled_from(TRANSPORTS),
    method=st.sampled_from(METHODS),
    data=st.data(),
)
def test_law_for_drawn_masks(pools, length, degrees, heads, transport, method, data):
    mask, more = data.draw(masks.drawn(length, matrices=True)), data.draw(changes(length))
    case = dict(heads=heads[0], kv_heads=heads[1], length=length, mask=mask, **more)
    expected = whole(**case)
    case |= dict(ulysses=degrees[0], ring=degrees[1], transport=transport, method=method)
    for rank, answer in enumerate(pools(4).run(law_case, [case])):
        labels = [f"{case} rank {rank} {n}" for n in NAMES[: len(expected)]]
        assert_sharded_equals_unsharded(answer[0], expected, labels)


@pytest.mark.slow
@ON_RANKS
@given(
    length=st.integers(1, 150),
    degrees=st.sampled_from([(2, 2), (1, 4)]),
    heads=st.sampled_from([*HEADS, (5, 5), (4, 2)]),
    method=st.sampled_from(METHODS),
    data=st.data(),
)
def test_law_for_drawn_layouts(pools, length, degrees, heads, method, data):
    """Each rank may hold any ranges of tokens, as many as the others."""
    mask, more = data.draw(masks.drawn(length, matrices=True)), data.draw(changes(length))
    alone = dict(heads=heads[0], kv_heads=heads[1], length=length, mask=mask, **more)
    padded = SequenceLayout(degrees[1], degrees[0]).padded_length(length)
    layout = data.draw(layouts.drawn(degrees[1], degrees[0], padded))
    case = dict(ulysses=degrees[0], ring=degrees[1], layout=layout, method=method, **alone)
    expected = whole(**alone)
    for rank, answer in enumerate(pools(4).run(law_case, [case])):
        labels = [f"{case} rank {rank} {n}" for n in NAMES[: len(expected)]]
        assert_sharded_equals_unsharded(answer[0], expected, labels)


@pytest.mark.parametrize(
    "degrees", [pytest.param((1, 4), id="1x4"), pytest.param((2, 2), id="2x2", marks=pytest.mark.slow)]
)
def test_law_for_balanced_documents(pools, degrees):
    """What the search finds, for rows of other documents each, with what changes the scores, windows and padding."""
    lengths = [[130, 60, 2, 40, 24], [17, 200, 39]]
    mask = AttentionMask(boundaries=boundaries_from_lengths(lengths))
    layout = balance([mask], SequenceLayout(degrees[1], degrees[0]), 256).layout
    assert layout.assignment
    cases = [
        dict(
            ulysses=degrees[0],
            ring=degrees[1],
            layout=layout,
            method=method,
            heads=8,
            kv_heads=2,
            length=256,
            mask=mask,
            **more,
        )
        for method in METHODS
        for mask, more in (
            *((dict(lengths=lengths), more) for more in ({}, *SCORES)),
            (dict(lengths=lengths, window_size=(50, None)), {}),
            (dict(lengths=lengths, causal=False), {}),
        )
    ]
    answers = pools(4).run(law_case, cases)
    for i, case in enumerate(cases):
        expected = whole(**{n: v for n, v in case.items() if n not in ("ulysses", "ring", "layout", "method")})
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
