"""Ranks that take their shares of one order have the same loader; a seed that differs between ranks is rank 0's."""

from __future__ import annotations

import pytest

from tests.data.loaders import same_samples_ranks as ranks


@pytest.mark.parametrize(
    ("sizes", "batch_sizes", "shuffle", "found"),
    [
        ([8, 6], [2, 2], [False, False], "8 samples in their order in batches of 2 on rank 0; 6 samples"),
        (
            [8, 8],
            [2, 4],
            [False, False],
            "in batches of 2 on rank 0; 8 samples in their order in batches of 4 on rank 1",
        ),
        ([8, 8], [2, 2], [True, False], "8 samples shuffled in batches of 2 on rank 0; 8 samples in their order"),
    ],
    ids=["lengths", "batch sizes", "orders"],
)
def test_loaders_that_differ_are_refused_on_all_ranks(pools, sizes, batch_sizes, shuffle, found):
    for said in pools(2).run(ranks.read, sizes, batch_sizes, [0, 0], shuffle):
        assert found in said
        assert "Trainer(use_distributed_sampler=False)" in said


def test_a_seed_of_each_rank_splits_one_order(pools):
    (one, said), (other, _) = pools(2).run(ranks.read, [8, 8], [2, 2], [3, 4], [True, True])
    assert sorted(one + other) == [*range(8)]
    assert [line.partition("):")[0] for line in said] == ["sequence_parallel: ranks have other seeds (3, 4"]
    assert [(one, []), (other, [])] == pools(2).run(ranks.read, [8, 8], [2, 2], [3, 3], [True, True])
