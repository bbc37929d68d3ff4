"""Losses of a group's own rows, where the samples do not divide: each group counts by its rows, a filler for nothing."""

from __future__ import annotations

import pytest

from tests.slow import slow
from tests.trainer.batches import weighed_ranks as ranks

GROUPS = {"data_parallel_size": 2}
KINDS = [each for each in ranks.LOSSES if each != "of all"]
# What a rank logs of such a loss is its own group's.
OWN = {"added up"}


@pytest.mark.parametrize("rows", [7, *slow(5)])  # the last step: 2 and 1, 1 and a filler
def test_each_group_counts_by_its_rows(pools, rows):
    for kind, (weights, logged), *found in zip(*_answers(pools, 2, GROUPS, KINDS, rows), strict=True):
        for trained, own in found:
            for name, weight in weights.items():
                assert (trained[name] - weight).abs().max() < 1e-10, (kind, name)
            assert kind in OWN or own == pytest.approx(logged, rel=1e-9), kind


@pytest.mark.parametrize(
    ("world", "strategy", "automatic"),
    [(2, GROUPS, False), pytest.param(4, {**GROUPS, "global_view": "auto"}, True, marks=pytest.mark.slow)],
)
def test_by_hand_and_along_sequences_too(pools, world, strategy, automatic):
    kinds = ["one hot", "added up"]
    for kind, (weights, _), *found in zip(*_answers(pools, world, strategy, kinds, 7, automatic), strict=True):
        for trained, _ in found:
            for name, weight in weights.items():
                assert (trained[name] - weight).abs().max() < 1e-10, (kind, name)


def test_a_filler_beside_another_loaders_samples(pools):
    [alone] = pools(1).run(ranks.side_by_side, 1, None, "of all")
    for found in pools(2).run(ranks.side_by_side, 2, GROUPS, "of all"):
        for name, weight in alone.items():
            assert (found[name] - weight).abs().max() < 1e-10, name
    for said in pools(2).run(ranks.side_by_side, 2, GROUPS, "beside"):
        assert "of one of several training loaders do not divide over the data-parallel groups" in said


def _answers(pools, world, strategy, kinds, *options):
    [alone] = pools(1).run(ranks.fit, 1, None, kinds, *options)
    return [kinds, alone, *pools(world).run(ranks.fit, world, strategy, kinds, *options)]
