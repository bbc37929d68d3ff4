"""A user's line that reads how many ranks there are hears how many of them share each sequence."""

from __future__ import annotations

import pytest

from tests.trainer.processes import counted_ranks_ranks as ranks


@pytest.mark.parametrize(
    ("strategy", "said"),
    [({"ring_size": 2}, ["num_devices", "world_size"]), ({"data_parallel_size": 2}, [])],
    ids=["sequence", "groups"],
)
def test_a_number_of_ranks_that_share_sequences_is_said_to_be_one(pools, strategy, said):
    """Once for a line, and not where it is compared."""
    answers = pools(2).run(ranks.fit, 2, strategy)
    for rank, (found, told) in enumerate(answers):
        assert found == [2, 2, 2, 2, True]
        assert [name in text for name, text in zip(said, told, strict=rank == 0)] == [True] * len(said) * (rank == 0)
        assert all("The world has 2, and 2 of them share each sequence" in text for text in told)
