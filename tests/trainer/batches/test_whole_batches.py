"""Batches without a sequence run whole on every rank of a sequence: weights, numbers and predictions are one device's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_sp.testing import max_error
from tests.trainer.batches import whole_ranks as ranks

LOSSES = ("mean", "sum", "rows", "contrastive", "pixels")
LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (2, dict(ulysses_size=2)), (2, dict(ring_size=2, preflight=False)), (4, dict(ulysses_size=2, ring_size=2)),
    (4, dict(data_parallel_size=2, ring_size=2)), (4, dict(data_parallel_size=2, ulysses_size=2, preflight=False)),
]  # fmt: skip

# Losses of a group's own rows, which are averaged over the groups.
OF_GROUPS = ("sum", "pixels")


def same(answer: dict[str, Any], expected: dict[str, Any]) -> None:
    assert not answer["error"], answer["error"]
    for name, weight in expected["weights"].items():
        assert max_error(answer["weights"][name], weight) < 1e-10, name
    assert answer["metrics"] == pytest.approx(expected["metrics"], rel=1e-6)
    assert max_error(answer["predicted"], expected["predicted"]) < 1e-10


@pytest.mark.parametrize("loss", [pytest.param(each, marks=[pytest.mark.slow] * (each != "sum")) for each in LOSSES])
def test_weights_metrics_and_predictions_are_one_devices(pools: Any, loss: str):
    expected = pools(1).run(ranks.trained, None, 4, dict(loss=loss))[0]
    layouts = LAYOUTS if loss == "mean" else LAYOUTS[2:4]
    for world, strategy in layouts:
        micro = 4 // strategy.get("data_parallel_size", 1)
        answers = pools(world).run(ranks.trained, strategy, micro, dict(loss=loss))
        for answer in answers:
            same(answer, expected)
            assert answer["groups"] == [None, None]
            if loss not in OF_GROUPS:
                assert answer["losses"] == pytest.approx(expected["losses"], abs=1e-12)
        of_ranks = zip(*(answer["losses"] for answer in answers), strict=True)
        assert [sum(each) / world for each in of_ranks] == pytest.approx(expected["losses"], abs=1e-12)


def test_ulysses_may_exceed_the_heads_of_attention_over_pictures(pools: Any):
    expected = pools(1).run(ranks.trained, None, 4, dict(heads=1))[0]
    for answer in pools(2).run(ranks.trained, dict(ulysses_size=2), 4, dict(heads=1)):
        same(answer, expected)


def test_over_tokens_they_are_refused_on_all_ranks(pools: Any):
    told = pools(2).run(ranks.refusal_of_tokens)
    assert told[0].startswith("ulysses_size=2 exceeds the 1 query heads of this attention: a rank would hold no head; ")
    assert told[0] == told[1]


def test_a_mean_of_each_groups_own_rows_is_averaged(pools: Any):
    expected = pools(1).run(ranks.trained, None, 4, dict(loss="own mean"))[0]
    for answer in pools(4).run(ranks.trained, dict(data_parallel_size=2, ring_size=2), 2, dict(loss="own mean")):
        same(answer, expected)


def test_micro_batches_are_accumulated_and_clipped(pools: Any):
    options: dict[str, Any] = dict(accumulate_grad_batches=2, gradient_clip_val=0.5)
    expected = pools(1).run(ranks.trained, None, 4, {}, ranks.rows(24), options)[0]
    for answer in pools(2).run(ranks.trained, dict(ring_size=2), 4, {}, ranks.rows(24), options):
        same(answer, expected)


def test_one_warning_says_what_is_not_split(pools: Any):
    first, second = pools(2).run(ranks.trained, dict(ring_size=2), 4, {})
    assert second["warnings"] == []
    (told,) = first["warnings"]
    assert "holds no sequence (0: (4, 3, 8, 8), 1: (4,))" in told
    assert "each of the 2 ranks of a sequence does the whole" in told
    assert "sequence_parallel_size=1" in told


def test_ranks_of_a_sequence_draw_alike_and_groups_and_steps_do_not(pools: Any):
    found = pools(4).run(ranks.trained, dict(data_parallel_size=2, ring_size=2), 2, dict(p=0.5))
    assert [each["error"] for each in found] == [""] * 4
    assert len({str(each["losses"]) for each in found}) == 1  # a mean over all groups
    for name in ("draws", "validated"):
        numbers = [each[name] for each in found]
        assert numbers[0] == numbers[1] != numbers[2] == numbers[3], name
        drawn = [str(each) for of_rank in numbers[::2] for each in of_rank]
        assert len({*drawn}) == len(drawn) > 4, name
    for each in found[1:]:
        assert all(torch.equal(weight, found[0]["weights"][name]) for name, weight in each["weights"].items())


def test_other_numbers_on_ranks_of_a_sequence_are_refused(pools: Any):
    for answer in pools(2).run(ranks.trained, dict(ring_size=2), 4, dict(p=0.1, loss="generator")):
        assert "training_step's loss differs between ranks that share a sequence: [" in answer["error"]
        assert "drew other random numbers" in answer["error"]


def test_what_may_be_tokens_is_not_run_whole_unasked(pools: Any):
    series = [(torch.zeros(1, 4, dtype=torch.int64), torch.zeros(1)) for _ in range(4)]
    for answer in pools(2).run(ranks.trained, dict(ring_size=2), 4, {}, series):
        assert "no sequence dimension: it holds 0: (4, 1, 4), 1: (4, 1)" in answer["error"]
        assert "sequence_dims={} if none of them is a sequence" in answer["error"]


@pytest.mark.slow
def test_batches_of_tokens_and_of_pictures_in_turn(pools: Any):
    """The preflight waits for the first batch that is split."""
    expected = pools(1).run(ranks.in_turn, None)[0]
    for strategy in (dict(ring_size=2), dict(ulysses_size=2, preflight=False)):
        for answer in pools(2).run(ranks.in_turn, strategy):
            assert answer["losses"] == pytest.approx(expected["losses"], abs=1e-12)
            for name, weight in expected["weights"].items():
                assert max_error(answer["weights"][name], weight) < 1e-10, name


def test_groups_of_tokens_beside_groups_of_pictures_are_refused(pools: Any):
    answers = pools(4).run(ranks.mixed_groups)
    assert len({*answers}) == 1
    assert "data-parallel groups [0] hold a sequence in this batch, groups [1] hold none" in answers[0]


def test_rows_of_one_number_train_on_data_parallel_ranks(pools: Any):
    """Ids (B,) have a known name and no sequence: there is nothing to split, and nothing for a preflight."""
    (expected,) = pools(1).run(ranks.words, None, 4)
    for answer in pools(2).run(ranks.words, dict(sequence_parallel_size=1), 2):
        for name, weight in expected.items():
            assert max_error(answer[name], weight) < 1e-10, name
