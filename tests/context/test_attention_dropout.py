"""Attention dropout through the Trainer: the masks of one process in every layout, those of the forward in a recomputation."""

from __future__ import annotations

from functools import cache

import pytest

from lightning_sp.testing import assert_sharded_equals_unsharded
from tests.context import dropout_ranks as ranks

# A step of 4 samples, twice; then as many micro-batches of half the size.
# Ulysses has every model's preflight, groups of a ring that of half.
BUILDS = ("plain", "encoder", "llama", "gpt oss")
LAYOUTS = {
    2: [
        dict(strategy=dict(ulysses_size=2, preflight=True)),
        dict(strategy=dict(ring_size=2)),
        dict(strategy=dict(data_parallel_size=2), micro=2),
        dict(strategy=dict(ring_size=2), micro=2, accumulate_grad_batches=2),
    ],
    4: [
        dict(strategy=dict(ulysses_size=2, ring_size=2)),
        dict(strategy=dict(data_parallel_size=2, ring_size=2, preflight=True), micro=2),
        dict(strategy=dict(data_parallel_size=2, ulysses_size=2), micro=1, accumulate_grad_batches=2),
    ],
}


def cases_of(world):
    first, *others = LAYOUTS[world]
    # The first layout trains a second epoch.
    cases = [dict(build=b, max_epochs=2, **first) for b in (BUILDS if world == 2 else BUILDS[::2])]
    cases += [
        dict(build=b, max_epochs=1, **layout) for i, layout in enumerate(others) for b in BUILDS[(i + 1) % 2 :: 2]
    ]
    # Hugging Face's norms compute in float32, whose rounding is another one for a loss weighted by a micro-batch's tokens.
    return [c for c in cases if c["build"] not in ("llama", "gpt oss") or "accumulate_grad_batches" not in c]


# Of Ulysses and in two groups scaled_dot_product_attention, of Ulysses sinks, of a ring an encoder: the others are slow.
SOME = (0, 3, 4, 6)
OF_TWO = cases_of(2)


@pytest.fixture(scope="module")
def expected(pools):
    """What one process gives for a model, by its name."""
    return cache(lambda build: pools(1).run(ranks.run, 1, [dict(build=build, max_epochs=2)])[0][0])


def _first_epoch(one):
    return {"losses": one["losses"][:2], "grads": one["grads"][:2]}


def _same(answer, one, *, losses=True):
    assert not answer["error"], answer["error"]
    if losses:
        assert answer["losses"] == pytest.approx(one["losses"], abs=1e-12)
    assert len(answer["grads"]) == len(one["grads"])
    for step, (found, wanted) in enumerate(zip(answer["grads"], one["grads"], strict=True)):
        names = sorted(wanted)
        named = [f"step {step}: {n}" for n in names]
        assert_sharded_equals_unsharded([found[n] for n in names], [wanted[n] for n in names], named)


@pytest.mark.parametrize(
    ("world", "cases"),
    [
        pytest.param(2, [OF_TWO[i] for i in SOME], id="2"),
        pytest.param(2, [c for i, c in enumerate(OF_TWO) if i not in SOME], id="2, more", marks=pytest.mark.slow),
        pytest.param(4, cases_of(4), id="4", marks=pytest.mark.slow),
    ],
)
def test_every_layout_drops_what_one_process_drops(pools, expected, world, cases):
    for answers in pools(world).run(ranks.run, world, cases):
        for case, answer in zip(cases, answers, strict=True):
            one = expected(case["build"])
            if case["max_epochs"] == 1:
                one = _first_epoch(one)
            _same(answer, one, losses="accumulate_grad_batches" not in case)


def test_two_layers_and_two_steps_drop_other_weights(pools, expected):
    """Two attentions of one input differ by dropout alone, and at a learning rate of 0 the first epoch from the second."""
    without = pools(1).run(ranks.run, 1, [dict(build="none", max_epochs=1)])[0][0]
    assert without["equal"] == [True, True]
    assert expected("plain")["equal"] == [False] * 4
    losses = expected("llama")["losses"]
    assert min(abs(losses[0] - losses[2]), abs(losses[1] - losses[3])) > 1e-6


@pytest.mark.parametrize(
    "layout",
    [dict(ring_size=2), pytest.param(dict(ulysses_size=2, activation_checkpointing=True), marks=pytest.mark.slow)],
)
def test_recomputed_attention_drops_what_the_forward_dropped(pools, expected, layout):
    cases = [dict(build=b, max_epochs=2, strategy=layout) for b in ("checkpointed", "reentrant", "llama checkpointed")]
    for answers in pools(2).run(ranks.run, 2, cases):
        for case, answer in zip(cases, answers, strict=True):
            _same(answer, expected("llama" if "llama" in case["build"] else "plain"))


def test_evaluation_drops_nothing_and_moves_no_mask_of_training(pools, expected):
    case = dict(build="plain", max_epochs=2, strategy=dict(ring_size=2), validate=True)
    for (answer,) in pools(2).run(ranks.run, 2, [case]):
        _same(answer, expected("plain"))
        assert len(answer["evaluated"]) == 2
        assert answer["evaluated"][0] != answer["evaluated"][1], "trained in between"


def test_a_resumed_run_drops_what_the_uninterrupted_one_drops(pools, expected, tmp_path):
    save = str(tmp_path / "half.ckpt")
    first = dict(build="plain", max_epochs=1, strategy=dict(ring_size=2), save=save)
    then = dict(build="plain", max_epochs=2, strategy=dict(ulysses_size=2), resume=save)
    for begun, resumed in pools(2).run(ranks.run, 2, [first, then]):
        assert not begun["error"], begun["error"]
        one = expected("plain")
        _same(begun, _first_epoch(one))
        _same(resumed, {"losses": one["losses"][2:], "grads": one["grads"][2:]})


REFUSED = [
    (dict(build="forgetting"), ["recomputed in the backward, after 2 calls in the forward", "preserve_rng_state=True"]),
    (dict(build="evaluating", validate=True), ["attention dropout 0.3 in an evaluation step", "if self.training"]),
    (dict(build="all"), ["dropout probability 1.0: must be at least 0 and below 1"]),
]


def test_what_cannot_be_drawn_alike_is_refused_by_name(pools):
    cases = [dict(strategy=dict(ring_size=2), max_epochs=1, **case) for case, _ in REFUSED]
    for answers in pools(2).run(ranks.run, 2, cases):
        for answer, (case, parts) in zip(answers, REFUSED, strict=True):
            for part in parts:
                assert part in answer["error"], (case, answer["error"])
            assert "NOT BY NAME" not in answer["error"]
