"""An encoder of sounds runs whole on every rank beside a decoder's shard: every gradient is that of plain torch on one process."""

from __future__ import annotations

import pytest

from lightning_sp.testing import assert_sharded_equals_unsharded
from tests.rewrite.hugging_face.encoders import whole_encoder_ranks as ranks

# 8 tokens of a sound are as many as a rank has of the decoder's 16: nothing but the model's structure tells them apart.
CASES = [(kind, tokens) for kind in ("whisper", "speech_to_text") for tokens in (8, 11, 16)]
OFF = {"preflight": False}
LAYOUTS = {
    "ring": {"ring_size": 2, **OFF},
    "ulysses": {"ulysses_size": 2, **OFF, "activation_checkpointing": True},
    "preflight": {"ring_size": 2},
}


@pytest.mark.parametrize(
    "layout", [pytest.param(each, marks=[pytest.mark.slow] * (each == "preflight")) for each in LAYOUTS]
)
def test_every_gradient_is_that_of_one_process(pools, layout):
    chosen = CASES if layout == "ring" else CASES[::3]
    cases = [dict(kind=kind, tokens=tokens, strategy=LAYOUTS[layout]) for kind, tokens in chosen]
    for case, answer in zip(cases, pools(2).run(ranks.sharded, cases)[0], strict=True):
        assert not answer["error"], (case, answer["error"])
        one = ranks.one_process(**case)
        assert abs(answer["losses"][-1] - one["loss"]) <= 1e-10
        names = sorted(one["grads"])
        assert set(answer["grads"]) == set(names)
        assert_sharded_equals_unsharded([answer["grads"][n] for n in names], [one["grads"][n] for n in names], names)


def test_layers_of_the_encoder_are_skipped_alike_on_all_ranks(pools):
    """Else a rank would wait for a layer that its peer skips."""
    case = dict(kind="whisper that skips", tokens=8, strategy=LAYOUTS["ring"])
    one, two = (answers[0] for answers in pools(2).run(ranks.sharded, [case]))
    assert not one["error"], one["error"]
    assert one["losses"] == two["losses"]


def test_frames_masked_at_random_are_refused_by_name(pools):
    """Each rank would mask frames of its own."""
    case = dict(kind="whisper augmented", tokens=8, strategy=LAYOUTS["preflight"])
    for (answer,) in pools(2).run(ranks.sharded, [case]):
        # Older versions of transformers draw for layers that are never left out, too.
        assert "cannot be compared, since the step draws random numbers: " in answer["error"]
        assert "numpy.random in training_step. Whole, from two seeds" in answer["error"]
