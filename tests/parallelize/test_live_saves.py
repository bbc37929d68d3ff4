"""Weights that are saved as on one device, of a model whose ranks have parts: what a file does not hold is said."""

from __future__ import annotations

import pytest

from tests.parallelize import live_saves_ranks as ranks


@pytest.mark.parametrize("what", ["state_dict", "optimizer"])
def test_a_part_that_is_saved_for_the_whole_is_said_once(pools, what):
    for rank, (said, *more) in enumerate(pools(2).run(ranks.save, 2, what)):
        assert said.startswith("sequence_parallel: torch.save, or pickle, of sharded tensors, of a state_dict() say: ")
        assert f"what rank {rank} of 2 saves is its part of them alone" in said
        assert more == []


def test_nothing_is_said_of_whole_weights(pools):
    assert pools(2).run(ranks.save, 2, "whole") == [[], []]
