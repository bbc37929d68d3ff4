"""`sync_batchnorm=True`: batch norm over the rows and tokens of all ranks is that of one device with the whole global batch."""

from __future__ import annotations

import pytest

from lightning_sp.testing import assert_sharded_equals_unsharded
from tests.trainer.averages import batch_norm_ranks as ranks


@pytest.mark.parametrize(
    ("world", "strategy", "has_tokens"),
    [
        (2, dict(data_parallel_size=2, sequence_parallel_size=1), True),
        pytest.param(2, dict(ring_size=2), True, marks=pytest.mark.slow),
        (4, dict(data_parallel_size=2, ring_size=2), True),
        pytest.param(4, dict(data_parallel_size=2, ulysses_size=2), True, marks=pytest.mark.slow),
        pytest.param(4, dict(data_parallel_size=2, ring_size=2), False, marks=pytest.mark.slow),
    ],
    ids=["data 2", "ring 2", "data 2 x ring 2", "data 2 x ulysses 2", "pictures"],
)
def test_statistics_are_of_the_global_batch(pools, world, strategy, has_tokens):
    (alone,) = pools(1).run(ranks.run, None, 1, 4, has_tokens)
    micro = 4 // strategy.get("data_parallel_size", 1)
    for found in pools(world).run(ranks.run, strategy, world, micro, has_tokens):
        assert not found["error"]
        for kind in ("weights", "buffers"):
            assert found[kind].keys() == alone[kind].keys()
            names = list(alone[kind])
            assert_sharded_equals_unsharded([found[kind][n] for n in names], [alone[kind][n] for n in names], names)


def test_a_part_of_a_sequence_is_refused(pools):
    for found in pools(2).run(ranks.run, dict(ring_size=2, global_view=False), 2, 4, True, 16):
        assert found["error"].startswith(
            "sync_batchnorm=True: batch norm of (2, 8, 8) on a rank's part of the sequence"
        )


def test_it_is_the_remedy_of_statistics_that_differ(pools):
    for found in pools(4).run(ranks.run, dict(data_parallel_size=2, ring_size=2), 4, 2, True, 13, False):
        assert "buffers different on shards than whole" in found["error"]
        assert "Trainer(sync_batchnorm=True) has batch norm's over all ranks" in found["error"]
