"""Positions are those that the model counts on the whole batch, by its ids, its mask or its tokens' order; or the run is refused."""

from __future__ import annotations

import pytest

from lightning_sp.testing import assert_sharded_equals_unsharded
from tests.rewrite.hugging_face.positions import positions_ranks as ranks

RING, ULYSSES = {"ring_size": 2, "preflight": True}, {"ulysses_size": 2, "preflight": False}
COUNTS = ("llama", "bert", "roberta", "xmod", "esm", "opt", "bart decoder")
EXACT = [
    *(dict(name=name, padding=padding) for name in COUNTS for padding in ("left", "right")),
    *(dict(name=name, padding="none", length=29) for name in ("gpt2", "roberta", "opt", "bart decoder")),
    dict(name="opt", padding="left", kind="ids alone"),
    dict(name="opt", padding="right", kind="embeddings"),
    dict(name="bert", padding="left", kind="embeddings"),
    dict(name="bert", padding="right", positions="shifted"),
    dict(name="roberta", padding="right", positions="shifted"),
    dict(name="llama", positions="shifted"),
]
REFUSED = [
    (dict(name="roberta", kind="embeddings"), "counts the positions of its inputs_embeds in a way of its own, of this rank's 16 of 32 alone"),
    (dict(name="nystromformer"), "does not reach its attention through Hugging Face's interface"),
    (dict(name="llama", positions="packed"), "position_ids restart within 2 rows, and LlamaForCausalLM is called with use_cache=True"),
    (dict(name="roberta", positions="packed"), "position_ids restart within 2 rows"),
]  # fmt: skip


STRATEGIES = {"ring": RING, "ulysses without preflight": ULYSSES}
# Each case in one layout, each model in both: of a model's two paddings one, of the next model's the other.
FEW = {name: [i for i in range(len(EXACT)) if (i + i // 2) % 2 == place] for place, name in enumerate(STRATEGIES)}


@pytest.fixture(scope="module")
def expected():
    return [ranks.one_process(**case) for case in EXACT]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_gradient_is_that_of_one_process(pools, expected, strategy):
    hold(pools, expected, strategy, FEW[strategy])


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_gradient_in_every_layout(pools, expected, strategy):
    hold(pools, expected, strategy, [i for i in range(len(EXACT)) if i not in FEW[strategy]])


def test_the_model_of_tokens_counts_within_one_that_asks_for_pictures(pools):
    """What fails without pictures shows nothing of how it counts: left padding, which a first batch may lack, moved its positions."""
    case = dict(name="blip-2", padding="left")
    [answer, other] = pools(2).run(ranks.sharded, [{**case, "strategy": {**RING, "global_view": False}}])
    assert not answer[0]["error"], answer[0]["error"]
    expected = ranks.one_process(**case)
    assert abs(answer[0]["losses"][-1] - expected["loss"]) < 1e-6
    names = sorted(expected["grads"])
    assert_sharded_equals_unsharded(
        [answer[0]["grads"][name] for name in names], [expected["grads"][name] for name in names], names
    )
    assert other[0]["losses"] == answer[0]["losses"]


def hold(pools, references, strategy, numbers):
    chosen = [EXACT[i] for i in numbers]
    cases = [{**case, "strategy": STRATEGIES[strategy]} for case in chosen]
    found = pools(2).run(ranks.sharded, cases)
    for case, number, answer, other in zip(chosen, numbers, *found, strict=True):
        assert not answer["error"], (case, answer["error"])
        assert answer["own"] == (True, False), "torch has its own functions again"
        expected = references[number]
        assert abs(answer["losses"][-1] - expected["loss"]) < 1e-6, case
        names = sorted(expected["grads"])
        try:
            assert_sharded_equals_unsharded(
                [answer["grads"][name] for name in names], [expected["grads"][name] for name in names], names
            )
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error
        assert other["losses"] == answer["losses"]


@pytest.mark.parametrize("preflight", [True, False])
def test_what_cannot_be_counted_is_refused(pools, preflight):
    strategy = {"preflight": preflight}
    found = pools(2).run(ranks.sharded, [{**case, "strategy": strategy} for case, _ in REFUSED])
    assert [a["error"] for a in found[0]] == [a["error"] for a in found[1]], "ranks refuse together"
    for (case, part), answer in zip(REFUSED, found[0], strict=True):
        assert part in answer["error"], (case, answer["error"])


@pytest.mark.slow
def test_the_references_positions_are_the_models_own(pools):
    """Positions by order given to models that count otherwise, as once on both sides: the preflight finds it."""
    found = pools(2).run(ranks.handed_by_order, ["roberta", "opt", "bart decoder"])[0]
    for error in found:
        assert "gives another result on shards than whole" in error, error
