"""Batches of two sequences, an encoder's and a decoder's, through the Trainer: every gradient is that of plain torch on one process."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from lightning_sp.errors import SequenceParallelError
from lightning_sp.rewrite.hugging_face.encoders.encoder_decoder import decoder_inputs
from lightning_sp.testing import assert_sharded_equals_unsharded, max_error
from tests.drawn_cases.covering import covering
from tests.rewrite import encoder_decoder_ranks as ranks

LABELS = {"keep": ()}  # the decoder's input is made of them
# case, tolerance; float64, but T5Gemma's own loss is of float32 logits.
EXACT = [
    (dict(build="own"), 1e-10),
    (dict(build="own", data={"lengths": (29, 16), "padding": "right"}), 1e-10),
    (dict(build="own", data={"lengths": (30, 32), "padding": "holes"}), 1e-10),
    (dict(build="own", data={"lengths": (32, 32), "padding": "both"}), 1e-10),
    (dict(build="own", data={"lengths": (32, 32)}), 1e-10),
    (dict(build="own", data={"lengths": (32, 32), "padding": "one row"}), 1e-10),
    (dict(build="own", data={"lengths": (5, 40)}), 1e-10),
    (dict(build="dense"), 1e-10),
    (dict(build="dense of 30", data={"lengths": (30, 32)}), 1e-10),
    (dict(build="bias"), 1e-10),
    (dict(build="bias of 30", data={"lengths": (30, 32)}), 1e-10),
    (dict(build="flex", data={"lengths": (29, 24)}), 1e-10),
    (dict(build="torch"), 1e-10),
    (dict(build="t5", kind="hf", data=LABELS), 1e-10),
    (dict(build="t5", kind="hf", data={**LABELS, "padding": "right"}), 1e-10),
    (dict(build="t5", kind="hf", data={"lengths": (32, 32), "padding": "both"}), 1e-10),
    (dict(build="t5", kind="hf_labels", data=LABELS), 1e-10),
    (dict(build="t5 gated", kind="hf_logits"), 1e-10),
    (dict(build="t5", kind="hf", data={"padding": "right"}, strategy={"activation_checkpointing": True}), 1e-10),
    (dict(build="umt5", kind="hf", data=LABELS), 1e-10),
    (dict(build="bart of two versions", kind="hf", data={**LABELS, "padding": "right"}), 1e-10),
    (dict(build="bart", kind="hf", data={"lengths": (30, 32)}), 1e-10),
    (dict(build="headless"), 1e-10),
    (dict(build="with reader", kind="with_reader", data={"lengths": (32, 16)}), 1e-10),
    (dict(build="blenderbot", kind="hf", data=LABELS), 1e-10),
    (dict(build="pegasus", kind="hf", data=LABELS), 1e-10),
    (dict(build="m2m", kind="hf", data={**LABELS, "padding": "right"}), 1e-10),
    (dict(build="m2m of few", kind="hf", data={"lengths": (29, 16)}), 1e-10),
    (dict(build="bert2bert", kind="hf", data=LABELS), 1e-10),
    (dict(build="bert2bert", kind="hf", data={"padding": "right"}), 1e-10),
    (dict(build="bert2bert", kind="hf_labels", data=LABELS), 1e-10),
    (dict(build="t5gemma", kind="hf", data=LABELS), 1e-6),
    (dict(build="t5gemma", kind="hf", data={"padding": "both"}), 1e-6),
]  # fmt: skip
# The ring's fits have the preflight.
LAYOUTS = {2: [dict(ring_size=2), dict(ulysses_size=2, preflight=False)], 4: [dict(ulysses_size=2, ring_size=2)]}


@pytest.fixture(scope="module")
def expected():
    """What one process gives for a case, by its number."""
    return cache(lambda number: ranks.one_process(**EXACT[number][0]))


def axes(build, kind="own", data=None, strategy=None):
    """Return what a case is made of: the model's family, its loss and its data."""
    data = data or {}
    return dict(family=build.split()[0], kind=kind, padding=data.get("padding", ""), labels="keep" in data)


# Their attention, masks and positions are those of T5, BART and the model of one's own; two ranks run them.
ALIKE = ("umt5", "blenderbot", "pegasus", "torch")
# Their preflight is that of T5, BART and the model of one's own; with the preflight they are slow.
VARIANTS = (
    "m2m",
    "dense",
    "flex",
    "t5gemma",
    "t5 gated",
    "umt5",
    "bart of two versions",
    "blenderbot",
    "pegasus",
    "m2m of few",
    "dense of 30",
    "bias of 30",
    "bert2bert",
)
# Of models that are another's with other sizes or another way of making its input: the slow test runs them.
MOST = tuple(
    i
    for i, (case, _) in enumerate(EXACT)
    if case["build"] not in ("umt5", "pegasus", "dense of 30", "bias of 30", "torch", "t5 gated")
)
# Of each the last case: its data are seldom the plain ones.
FAMILIES = tuple(
    {family: i for i, (case, _) in enumerate(EXACT) if (family := case["build"].split()[0]) not in ALIKE}.values()
)
OF_DATA = tuple(covering([{**axes(**case), "family": ""} for case, _ in EXACT]))
# Of each family one way to make its input and its loss, and what planted faults show in; of the data alone two models.
USUAL = {
    "own",
    "dense",
    "flex",
    "t5 hf",
    "bart hf",
    "headless",
    "with reader with_reader",
    "m2m hf",
    "bert2bert hf",
    "t5gemma hf",
}


def usual(numbers, names=frozenset(USUAL)):
    return [i for i in numbers if f"{EXACT[i][0]['build']} {EXACT[i][0].get('kind', '')}".strip() in names]


SOME, SOME_OF_DATA = usual(MOST), usual(OF_DATA, {"own", "t5 hf"})


@pytest.mark.parametrize(
    ("world", "numbers"),
    [
        pytest.param(2, (SOME, SOME_OF_DATA), id="2"),
        pytest.param(
            2,
            ([i for i in MOST if i not in SOME], [i for i in OF_DATA if i not in SOME_OF_DATA]),
            id="2, more",
            marks=pytest.mark.slow,
        ),
        pytest.param(4, (FAMILIES,), id="4", marks=pytest.mark.slow),
    ],
)
def test_every_gradient_is_that_of_one_process(pools, expected, world, numbers):
    """A ring of two runs nearly every case, four ranks one of each family, Ulysses those of the data alone.

    Cases that differ in their data alone are steps of one fit, whose first batch has the preflight; variants of a model have none here.
    """
    for layout, chosen in zip(LAYOUTS[world], numbers, strict=True):
        hold_gradients(pools, expected, world, layout, chosen, ranks.together)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "layout"), [(world, layout) for world in LAYOUTS for layout in LAYOUTS[world]])
def test_every_gradient_in_every_layout(pools, expected, world, layout):
    hold_gradients(pools, expected, world, layout, range(len(EXACT)))


def hold_gradients(pools, expected, world, layout, chosen, sharded=ranks.sharded):
    cases = [{**EXACT[i][0], "strategy": {**EXACT[i][0].get("strategy", {}), **layout}, "world": world} for i in chosen]
    if sharded is ranks.together:
        for case in cases:
            if case["build"] in VARIANTS or "activation_checkpointing" in case["strategy"]:
                case["strategy"] |= {"preflight": False}
    for answers in pools(world).run(sharded, cases):
        for i, answer in zip(chosen, answers, strict=True):
            (case, tolerance), one = EXACT[i], expected(i)
            assert not answer["error"], f"{case} {layout}\n{answer['error']}"
            assert abs(answer["losses"][-1] - one["loss"]) <= tolerance * max(1, one["loss"]), (case, layout)
            names = sorted(one["grads"])
            assert set(answer["grads"]) == set(names)
            assert_sharded_equals_unsharded(
                [answer["grads"][n] for n in names], [one["grads"][n] for n in names], names, tolerance
            )


@pytest.mark.slow
@pytest.mark.parametrize("build", ["own", "t5"])
def test_data_parallel_groups_may_differ_in_what_their_padding_hides(pools, build):
    """A group whose batch hides nothing meets no collective of one whose does."""
    case = dict(build=build, kind="own" if build == "own" else "hf", data={"lengths": (32, 32), "padding": "one row"})
    one = ranks.one_process(**case)
    layout = {"data_parallel_size": 2, "ring_size": 2}
    for (answer,) in pools(4).run(ranks.sharded, [{**case, "strategy": layout, "world": 4, "rows": 1}]):
        assert not answer["error"], answer["error"]
        names = sorted(one["grads"])
        assert_sharded_equals_unsharded([answer["grads"][n] for n in names], [one["grads"][n] for n in names], names)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "layout"), [("longt5", {"ring_size": 2}), ("longt5 with globals", {"ulysses_size": 2})]
)
def test_what_attends_by_blocks_of_its_own_is_seen_whole(pools, build, layout):
    """A rank's part alone refuses it, so the step is tried in the global view."""
    case = dict(build=build, kind="hf_wide", data={**LABELS, "padding": "right"})
    one = ranks.one_process(**case)
    for (answer,) in pools(2).run(ranks.sharded, [{**case, "strategy": {**layout, "global_view": "auto"}}]):
        assert not answer["error"], answer["error"]
        names = sorted(one["grads"])
        assert_sharded_equals_unsharded([answer["grads"][n] for n in names], [one["grads"][n] for n in names], names)


REFUSED = [
    (dict(build="causal"), ["16 queries over 32 keys", "cross attention has no order"]),
    (dict(build="t5", kind="hf_no_labels", data=LABELS, strategy={"preflight": False}), ["got no decoder_input_ids", "part of the input_ids"]),
    (dict(build="t5gemma", kind="hf", data={}), ["that hides tokens reached the model", "a decoder's as decoder_attention_mask"]),
    (
        dict(build="longt5", kind="hf"),
        ["LongT5LocalAttention makes its bias of (block_length: int)", "cannot be rewritten", "global_view=True"],
    ),
    (dict(build="own count", kind="hf", data=LABELS, strategy={"preflight": False}), ["CountsItself counts the positions of its tokens"]),
    (dict(build="bert2bert", kind="hf_logits", data=LABELS), ["EncoderDecoderModel got decoder_input_ids and no decoder_attention_mask"]),
    (dict(build="own", strategy={"labels_shifted": None}), ["the batch has 'labels', and nothing says whether they are shifted"]),
]  # fmt: skip


@pytest.mark.slow
def test_what_cannot_be_carried_is_refused_by_name(pools):
    for answers in pools(2).run(ranks.sharded, [case for case, _ in REFUSED]):
        for (case, parts), answer in zip(REFUSED, answers, strict=True):
            for part in parts:
                assert part in answer["error"], (case, answer["error"])
            assert "NOT BY NAME" not in answer["error"]


def test_of_two_models_it_is_not_known_whose_shift_the_labels_need():
    models = [ranks.BUILDS[name]() for name in ("t5", "blenderbot")]
    labels = torch.tensor([[5, 6, 7]])
    for model in models:
        own = decoder_inputs([model])(labels)
        assert own.tolist() == [[model.config.decoder_start_token_id, 5, 6]]
    with pytest.raises(
        SequenceParallelError,
        match=r"labels or ids of shape \(1, 3\) and no decoder_input_ids: how T5.*, Blenderbot.* makes",
    ):
        decoder_inputs(models)(labels)


def test_the_cases_above_notice_the_faults_of_others(pools, expected):
    for fault, build, data in (
        ("decoder inputs shifted on the shard", "t5", LABELS),
        ("the encoder's padding is seen", "own", None),
    ):
        case = dict(build=build, kind="hf" if build == "t5" else "own", data=data, fault=fault)
        one = ranks.one_process(**case)
        answer = pools(2).run(ranks.sharded, [case])[0][0]
        assert not answer["error"], answer["error"]
        assert max(max_error(answer["grads"][n], g) for n, g in one["grads"].items()) > 1e-7, fault


@pytest.mark.parametrize("build", ["t5", "headless"])
def test_predictions_of_both_sequences_are_whole(pools, build):
    data = {"lengths": (29, 16), "keep": ("decoder_input_ids",)}
    for found, one in pools(2).run(ranks.predictions, build, data, {"ring_size": 2}, 2):
        assert {n: tuple(t.shape) for n, t in found.items()} == {n: tuple(t.shape) for n, t in one.items()}
        assert_sharded_equals_unsharded([found[n] for n in one], list(one.values()), list(one))
