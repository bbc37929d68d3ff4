"""With sequence_parallel_size=1: one device's gradients, DDP's of what compares rows."""

from __future__ import annotations

import pytest

from lightning_sp.testing import max_error
from tests.loss import whole_sequences_ranks as ranks

KINDS = (*ranks.GLOBAL, *ranks.OF_GROUPS)
# Means, sums of all groups and of each group's own, with and without reductions, and what compares rows.
SOME = ("plain", "sum_over_all_targets", "sum_over_rows_and_penalty", "over_rows", "sum_of_kept", "contrastive")


@pytest.mark.parametrize(
    ("groups", "kinds"),
    [
        pytest.param(2, SOME, id="2"),
        pytest.param(2, [kind for kind in KINDS if kind not in SOME], id="2, more", marks=pytest.mark.slow),
        pytest.param(4, KINDS, id="4", marks=pytest.mark.slow),
    ],
)
def test_hand_written_losses(pools, groups, kinds):
    case = dict(
        masks="uneven", strategy=dict(data_parallel_size=groups), micro=2 * groups, world=groups, preflight=True
    )
    cases = [{**case, "kind": kind} for kind in kinds]
    found = pools(groups).run(ranks.group_fits, cases)
    for kind, *answers in zip(kinds, *found, strict=True):
        for answer in answers:
            assert not answer["error"], (kind, answer["error"])
            for step, expected in zip(answer["grads"], ranks.gradients(kind, groups, 2 * groups), strict=True):
                assert max(max_error(step[name], one) for name, one in expected.items()) < 1e-12, kind


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["drawn", "counts_calls"])
def test_what_no_single_device_gives_trains(pools, kind):
    case = dict(kind=kind, masks="uneven", strategy=dict(data_parallel_size=2), micro=4, preflight=True)
    for (answer,) in pools(2).run(ranks.group_fits, [case]):
        assert not answer["error"], answer["error"]
        assert len(answer["grads"]) == 2


@pytest.mark.slow
def test_accumulation_divides_as_lightning_does(pools):
    case = dict(masks="uneven", strategy=dict(data_parallel_size=2), micro=2, accumulate=2, preflight=True)
    two, sums, at_times = pools(2).run(
        ranks.group_fits, [{**case, "kind": kind} for kind in ("two", "over_rows", "at_times")]
    )[0]
    assert [each["error"] for each in (two, sums, at_times)] == [""] * 3
    assert len(at_times["grads"]) == 2
    for kind, answer in (("two", two), ("over_rows", sums)):
        expected = ranks.gradients(kind, 2, 2, accumulate=2)
        for step, one in zip(answer["grads"], expected, strict=True):
            assert max(max_error(step[name], each) for name, each in one.items()) < 1e-12, kind


def test_a_sum_beside_reductions_is_refused_without_a_preflight(pools):
    case = dict(
        kind="sum_over_all_targets", masks="uneven", strategy=dict(data_parallel_size=2), micro=4, preflight=False
    )
    for (answer,) in pools(2).run(ranks.group_fits, [case]):
        assert "1 cross entropies with reduction='sum' beside batch_mean, batch_sum or gather_rows" in answer["error"]
        assert (
            "total = batch_sum(F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction='none'))"
            in answer["error"]
        )
        assert not answer["grads"]
