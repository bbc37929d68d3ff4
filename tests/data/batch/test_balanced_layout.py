"""Balanced layouts through the real Trainer: training on packed documents is that of one process, wherever the tokens lie."""

from __future__ import annotations

import pytest
import torch

from lightning_sp.attention import AttentionMask, boundaries_from_lengths
from lightning_sp.attention.plan.balance import Balance, balance, imbalance
from lightning_sp.context.masks import AttentionPattern
from lightning_sp.data.batch import balanced_layout
from lightning_sp.data.batch.shard_options import ShardOptions
from lightning_sp.layout import SequenceLayout
from tests.data.batch import balance_ranks
from tests.trainer import scenarios
from tests.trainer.test_fit import same_run

DOCUMENTS = dict(size=8, documents=(20, 7, 4, 1))
PADDED = dict(size=8, length=29, documents=(18, 7, 3, 1))
LAYOUTS = [
    dict(ring_size=4),
    dict(ring_size=2, ulysses_size=2),
    dict(ring_size=2, data_parallel_size=2, shard_size=2),
]


@pytest.mark.parametrize(
    ("model", "some"),
    [
        pytest.param("llama", (0,), id="llama"),
        pytest.param("llama", (1, 2), id="llama, other layouts", marks=pytest.mark.slow),
        pytest.param("hugging face", (0, 1, 2), id="hugging face", marks=pytest.mark.slow),
    ],
)
def test_a_balanced_fit_is_that_of_one_process(pools, model, some):
    """Each layout runs both models, each model both kinds of data."""
    common = dict(model=model, accumulate_grad_batches=2, gradient_clip_val=0.5)
    both = (DOCUMENTS, PADDED)
    alone = [dict(world=1, strategy={}, data=data, micro=4, **common) for data in both]
    references = pools(1).run(scenarios.fits, alone)[0]
    for i in some:
        layout = LAYOUTS[i]
        # The ring alone runs both; then Llama is padded where Hugging Face's is not.
        chosen = (0, 1) if i == 0 else ((i + (model == "llama")) % 2,)
        expected = [references[k] for k in chosen]
        micro = 4 // layout.get("data_parallel_size", 1)
        cases = [
            dict(world=4, strategy=dict(balance="documents", **layout), data=data, micro=micro, **common)
            for data in (both[k] for k in chosen)
        ]
        for answers in pools(4).run(scenarios.fits, cases):
            for answer, one in zip(answers, expected, strict=True):
                same_run(answer, one)
                assert any(each.assignment for each in answer["layouts"]), "no batch was balanced: nothing was tested"


@pytest.mark.slow
def test_the_layout_follows_each_batch(pools):
    case = dict(model="llama", world=4, strategy=dict(ring_size=4, balance="documents"), data=DOCUMENTS, micro=1)
    for answers in pools(4).run(scenarios.fits, [case]):
        assert len(set(answers[0]["layouts"])) > 1


def test_a_batch_that_needs_none_has_not_the_layout_of_the_one_before(pools):
    """Packed batches of other lengths, as collators without padding make them: some are balanced, and others lie in zigzag."""
    data = [dict(size=1, length=64, documents=(40, 16, 7, 1)), dict(size=1, length=48), dict(size=1, length=64)]
    expected = pools(1).run(scenarios.fits, [dict(model="llama", world=1, strategy={}, data=data, micro=1)])[0][0]
    case = dict(model="llama", world=2, strategy=dict(ring_size=2, balance="documents"), data=data, micro=1)
    for answers in pools(2).run(scenarios.fits, [case]):
        same_run(answers[0], expected)
        assert [bool(layout.assignment) for layout in answers[0]["layouts"]] == [True, False, False]


@pytest.mark.slow
def test_from_the_second_batch_on_what_the_layers_see_is_balanced(pools):
    """A model that looks both ways needs another layout than a causal one; what it does is known once it has run."""
    data, case = dict(size=2, length=64, documents=(40, 16, 7, 1)), dict(model="both ways", micro=2, max_epochs=3)
    expected = pools(1).run(scenarios.fits, [dict(world=1, strategy={}, data=data, **case)])[0][0]
    strategy = dict(ring_size=4, balance="documents", preflight=False)
    for answers in pools(4).run(scenarios.fits, [dict(world=4, strategy=strategy, data=data, **case)]):
        same_run(answers[0], expected)
        first, second, third = answers[0]["layouts"]
        rows = boundaries_from_lengths([[40, 16, 7, 1], [16, 7, 1, 40]])
        causal, both = AttentionMask(boundaries=rows), AttentionMask(False, rows)
        assert first == balance([causal], SequenceLayout(4), 64).layout
        assert second == third == balance([both], SequenceLayout(4), 64).layout
        assert imbalance([both], second, 64) < imbalance([both], first, 64)


@pytest.mark.slow
def test_auto_leaves_zigzag_where_it_pays_and_says_so_once(pools):
    long = dict(size=1, length=4096, documents=(2500, 996, 500, 100))
    expected = pools(1).run(scenarios.fits, [dict(model="llama", world=1, strategy={}, data=long, micro=1)])[0][0]
    for answers in pools(4).run(
        scenarios.fits, [dict(model="llama", world=4, strategy=dict(ring_size=4), data=long, micro=1)]
    ):
        same_run(answers[0], expected)
        assert answers[0]["layouts"][0].assignment
    for answer in pools(4).run(balance_ranks.by_hand, 4, dict(ring_size=4), long):
        assert answer["layout"].assignment
        (line,) = answer["lines"]
        assert "over a ring of 4, first batch: balanced, the busiest rank computes" in line
        assert "zigzag it would be 107.6%" in line
    for answer in pools(4).run(balance_ranks.by_hand, 4, dict(ring_size=4), DOCUMENTS):
        assert not answer["layout"].assignment, "tiny sequences are not worth the kernel calls"
        (line,) = answer["lines"]
        assert "first batch: zigzag, the busiest rank computes" in line
    for answer in pools(4).run(balance_ranks.by_hand, 4, dict(ring_size=4, balance="zigzag"), long):
        assert not answer["layout"].assignment
        assert answer["lines"] == []


def test_predictions_and_gathering_by_hand_know_the_layout(pools):
    expected = pools(1).run(balance_ranks.predicted, 1, {}, PADDED)[0]
    for layout in LAYOUTS:
        for answer in pools(4).run(balance_ranks.predicted, 4, dict(balance="documents", **layout), PADDED):
            assert answer["assigned"]
            assert torch.equal(answer["tokens"], answer["whole"])
            assert torch.equal(answer["best"], expected["best"])
    for answer in pools(4).run(balance_ranks.by_hand, 4, dict(ring_size=4, balance="documents"), DOCUMENTS):
        assert answer["layout"].assignment
        assert torch.equal(answer["seen"], answer["whole"])
        assert answer["again"]


@pytest.mark.parametrize(
    ("pays", "zigzag", "kept"), [(True, 0.5, True), (True, 0.04, False), (False, 0.5, False)], ids=str
)
def test_what_is_weighed_is_every_layer_and_auto_leaves_zigzag_where_it_pays(monkeypatch, pays, zigzag, kept):
    degrees = SequenceLayout(2, 1)
    other = SequenceLayout(2, 1, (((0, 2), (6, 8)), ((2, 6),)))
    asked = []

    def weighed(masks, layout, length, *, device):
        asked.extend(masks)
        return Balance(other, 0.0, zigzag, 0, 0, pays)

    monkeypatch.setattr(balanced_layout, "balance", weighed)
    patterns = (AttentionPattern(), AttentionPattern(hides_padding=True), AttentionPattern())
    valid = torch.tensor([[0, 6]])
    options = ShardOptions(balance="auto", attention=patterns)
    found = balanced_layout.balanced_layout(boundaries_from_lengths([[5, 3]]), valid, degrees, 8, options)
    assert found.layout == (other if kept else degrees)
    assert asked[0] is asked[2]  # layers alike are one object, and count as often as they are
    assert [each.valid is None for each in asked] == [True, False, True]
    assert balanced_layout.balanced_layout(None, valid, degrees, 8, options) is None
