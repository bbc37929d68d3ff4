"""A name that one rank logs over all ranks, where another logs another one, is refused: their numbers would be added up."""

from __future__ import annotations

from tests.trainer.logged_numbers import other_name_ranks


def test_another_name_over_all_ranks_is_refused_and_one_of_a_ranks_own_is_not(pools):
    first, second = pools(2).run(other_name_ranks.log_apart_and_together)
    assert first == second
    (error, steps), alone = first
    assert (
        "logged with sync_dist=True is first, rank 0 on rank 0; first, rank 1 on rank 1: must be the same on" in error
    )
    assert steps == 2
    assert alone == ("", 4)
