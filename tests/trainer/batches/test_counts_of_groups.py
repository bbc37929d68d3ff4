"""Losses that a step divides by a count of its group's own: each group counts by that, be it that the first batches have equal ones."""

from __future__ import annotations

import pytest

from tests.slow import slow
from tests.trainer.batches import counted_ranks as ranks

GROUPS = {"data_parallel_size": 2}
BY_HAND = ["masked", "clamped", "times", "selected", "terms", "plus one"]


@pytest.mark.parametrize(
    ("world", "strategy", "kinds", "rows", "automatic", "accumulated"),
    [
        (2, GROUPS, ["clamped", "terms", "rows", "by rows", "plus one"], 12, True, 1),
        *slow(
            (2, GROUPS, ["masked", "times", "selected", "added up"], 12, True, 1),
            (2, GROUPS, BY_HAND, 11, True, 1),
            (2, GROUPS, ["clamped", "terms", "plus one"], 12, False, 1),
            (2, GROUPS, ["clamped", "selected", "plus one"], 12, True, 3),
            (4, {**GROUPS, "global_view": "auto"}, [*BY_HAND, "by rows"], 12, True, 1),
        ),
    ],
)
def test_each_group_counts_by_what_it_divides_by(pools, world, strategy, kinds, rows, automatic, accumulated):
    [alone] = pools(1).run(ranks.fit, 1, None, kinds, rows, automatic, accumulated)
    of_ranks = pools(world).run(ranks.fit, world, strategy, kinds, rows, automatic, accumulated)
    for kind, (weights, _), *found in zip(kinds, alone, *of_ranks, strict=True):
        for trained, told in found:
            assert told == [], kind
            for name, weight in weights.items():
                assert (trained[name] - weight).abs().max() < 1e-10, (kind, name)


def test_counts_that_no_trial_can_tell_of_are_named(pools):
    for rank, [(_, told)] in enumerate(pools(2).run(ranks.fit, 2, GROUPS, ["drawn"])):
        assert ["divide a term of the loss by other numbers" in each for each in told] == [True] * (not rank)


@slow
def test_what_only_looks_like_a_count_with_something_added_is_averaged_with_a_warning(pools):
    for rank, [(_, told)] in enumerate(pools(2).run(ranks.fit, 2, GROUPS, ["root"])):
        assert any("averaged as DDP does" in each for each in told) == (not rank)
