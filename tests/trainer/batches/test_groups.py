"""Samples dealt over data-parallel groups: each counts once, whatever the loader, and groups without one count for nothing."""

from __future__ import annotations

import pytest

from tests.trainer.batches import group_ranks as ranks

GROUPS = {"data_parallel_size": 2}
KINDS = ["dropped", "some", "stream", "batches", "order", "own", "at once", "few"]


def test_evaluation_batches_of_any_order_count_once(pools):
    [alone] = pools(1).run(ranks.evaluate, 1, None, KINDS)
    answers = pools(2).run(ranks.evaluate, 2, GROUPS, KINDS)
    for kind, (logged, predicted), *found in zip(KINDS, alone, *answers, strict=True):
        for own, rows in found:
            assert {name: own[name] for name in ("rows", "first", "mean")} == pytest.approx(
                {name: logged[name] for name in ("rows", "first", "mean")}
            ), kind
            assert rows == predicted, kind
        assert found[0][0]["together"] == pytest.approx(logged["together"]), kind


def test_loaders_side_by_side_in_an_evaluation_are_refused(pools):
    for said in pools(2).run(ranks.side_by_side, 2, GROUPS):
        assert "CombinedLoader(mode='max_size_cycle') of 2 loaders in validation" in said
        assert "mode='sequential'" in said


@pytest.mark.parametrize("strategy", [{"ring_size": 2}, pytest.param(GROUPS, marks=pytest.mark.slow)])
def test_what_a_step_reads_of_its_loader_is_the_users(pools, strategy):
    [(kept, read)] = pools(1).run(ranks.trained, 1, None)
    for found, own in pools(2).run(ranks.trained, 2, strategy):
        assert found[0] == kept[0]
        assert own[:2] == read[:2]


def test_a_monitored_number_is_that_of_all_groups(pools):
    [(epochs, losses)] = pools(1).run(ranks.stopped, 1, None)
    assert epochs == 4
    for found in pools(2).run(ranks.stopped, 2, GROUPS):
        assert found == (epochs, pytest.approx(losses))


@pytest.mark.parametrize(
    ("automatic", "accumulated"), [(True, 2), (False, 1), pytest.param(True, 1, marks=pytest.mark.slow)]
)
def test_a_loss_by_hand_of_fillers_counts_for_nothing(pools, automatic, accumulated):
    [alone] = pools(1).run(ranks.by_hand, 1, None, automatic, accumulated)
    for found in pools(2).run(ranks.by_hand, 2, GROUPS, automatic, accumulated):
        for name, weight in alone.items():
            assert (found[name] - weight).abs().max() < 1e-10, name


def test_tensors_of_other_shapes_are_not_gathered(pools):
    for said in pools(2).run(ranks.gathered, 2, GROUPS):
        assert "all_gather of tensors that differ between ranks (rank 0: (1,), torch.float32; rank 1: (2,)" in said
