"""Attention to tokens that are not the sequence's runs whole on every rank, as many as there may be of them."""

from __future__ import annotations

import pytest
from torch import nn

from lightning_sp.preflight.differences.other_tokens import CropCalls, OtherTokens, with_those_known
from lightning_sp.preflight.recording.watch import AttentionCall
from lightning_sp.testing import assert_sharded_equals_unsharded
from tests.preflight.differences import other_tokens_ranks as ranks

# 32 patches are as many as a shard has of the crop, 64 as the crop, 48 as a shard has of the sequence, 96 is no name's length.
WHOLE = [
    dict(way=way, patches=patches, length=length)
    for way, patches, length in (
        ("mean", 9, 96), ("mean", 32, 96), ("mean", 64, 96), ("mean", 48, 96), ("cross", 48, 96), ("cross", 32, 96), ("none", 32, 96),
        ("cross", 64, 64 + 26),
    )
]  # fmt: skip
REFUSED = [
    (dict(way="latents", patches=9, length=96), "model.cross attends from other tokens to the sequence (queries x keys on"),
    (dict(way="shared", patches=9, length=96), "model.attention attends to the sequence and to other tokens"),
]  # fmt: skip


RING, ULYSSES = {"ring_size": 2}, {"ulysses_size": 2, "activation_checkpointing": True}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "cases"),
    [(RING, WHOLE), (ULYSSES, WHOLE[1::2]), (ULYSSES, WHOLE[::2])],
    ids=["ring", "ulysses", "ulysses, the others"],
)
def test_every_gradient_is_that_of_one_process(pools, layout, cases):
    """What runs whole is found before any layout is asked: Ulysses tries each way once, and each number but 9."""
    found = pools(2).run(ranks.sharded, [{**case, "strategy": layout} for case in cases])
    for case, answer in zip(cases, found[0], strict=True):
        assert not answer["error"], (case, answer["error"])
        expected = ranks.one_process(**case)
        names = sorted(expected)
        assert_sharded_equals_unsharded([answer["grads"][n] for n in names], [expected[n] for n in names], names)


@pytest.mark.slow
def test_what_cannot_be_told_apart_is_refused_on_all_ranks(pools):
    off = [dict(way="mean", patches=48, length=96, strategy={"preflight": False})]
    found = pools(2).run(ranks.sharded, [case for case, _ in REFUSED] + off)
    assert [a["error"] for a in found[0]] == [a["error"] for a in found[1]]
    for (_, part), answer in zip(REFUSED, found[0], strict=False):
        assert part in answer["error"], answer["error"]
    assert "whose batch also holds pixels (2, 48, 16): the numbers are equal" in found[0][-1]["error"]


LEARNED = {"learned queries": "queries", "learned keys": "keys", "learned both": "queries and keys"}


@pytest.mark.parametrize("layout", [{"ulysses_size": 2}, {"ring_size": 2}], ids=["ulysses", "ring"])
def test_learned_arrays_are_refused_without_the_preflight(pools, layout):
    off = {"strategy": {**layout, "preflight": False}, "length": 96}
    cases = [{**off, "way": way, "patches": 48} for way in LEARNED]
    for answers in pools(2).run(ranks.sharded, cases):
        for which, answer in zip(LEARNED.values(), answers, strict=True):
            assert (
                f"attention of 48 queries over 48 keys: the {which} are the same numbers on all 2 ranks"
                in answer["error"]
            )


@pytest.mark.slow
def test_dropout_of_what_runs_whole_is_off_in_the_preflight(pools):
    for (answer,) in pools(2).run(ranks.sharded, [dict(way="dropout", patches=9, length=96, strategy=RING)]):
        assert not answer["error"], answer["error"]


def test_ranks_fail_together_in_the_preflight(pools):
    """On shorter crops, too: the other rank stops before its collective, and the global view, which shows all tokens, trains."""
    found = pools(2).run(ranks.one_fails, 2, False)
    assert all("IndexError: this rank's own" in each for each in found), found
    assert pools(2).run(ranks.one_fails, 2, "auto") == ["", ""]


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.images, self.sounds, self.text, self.cross = (nn.Sequential(nn.Identity()) for _ in range(4))


def of(model, *names):
    return CropCalls(
        module=model,
        crop="",
        whole=[AttentionCall(each, 9, 9) for each in names],
        shorter=[],
        is_text=False,
        lengths=[],
    )


def test_towers_that_a_batch_of_text_does_not_call_stay_known():
    """A trial of such a batch had left them unknown, and the next images were refused."""
    model = Towers()
    known = OtherTokens([model.images, model.sounds], [model.cross])
    nothing = OtherTokens([], [])
    assert with_those_known(nothing, known, of(model, "text.0")) == known
    assert with_those_known(OtherTokens([model.images], []), known, of(model, "text.0", "images.0")) == known
    # What this step calls, it tells by itself.
    assert with_those_known(nothing, known, of(model, "images.0", "cross.0")) == OtherTokens([model.sounds], [])
    assert with_those_known(None, known, of(model)) == known
    assert with_those_known(nothing, None, of(model)) == nothing
    assert with_those_known(None, None, of(model)) is None
