"""What ranks tell one another through the store, on real ranks."""

from __future__ import annotations

import pytest

from lightning_sp.testing import run_ranks
from tests.comm.hangs import hang_ranks


def test_an_answer_of_the_store_is_waited_for_in_vain_for_a_limited_time(pools):
    first, never, late, waited_s, silent_s, later, at_last, failed, not_asked = pools(1).run(hang_ranks.slow_store)[0]
    assert (first, never) == (1, 0.0)
    assert late is None
    assert 0.2 <= waited_s < 5.0
    assert silent_s >= 0.2
    assert (later, at_last) == (True, 0.0)
    # After an error nothing is asked for a while.
    assert (failed, not_asked) == (None, None)


def test_a_world_does_not_hear_what_was_said_in_the_one_before(pools):
    assert pools(1).run(hang_ranks.channel_of_the_next_world) == [[True, False]]


def test_a_run_that_has_ended_leaves_no_thread(pools):
    assert pools(2).run(hang_ranks.threads_after_runs) == [[True, [], True, []]] * 2


def test_a_group_that_reaches_beyond_the_world_is_known(pools):
    assert pools(1).run(hang_ranks.groups_of_others) == [[False, True]]


def test_one_of_the_ranks_that_wait_compares_what_all_say(pools):
    rank0, rank1 = pools(2).run(hang_ranks.one_compares)
    # Rank 0 comes first. What a rank said before it was asked may be old; the second word of each is new.
    assert rank0[:2] == [(True, [False, False], "", False), (True, [True, True], "", False)]
    assert rank1[:2] == [(True, None, "", False)] * 2
    # It waits no more, and rank 1 takes its place. The first reason stays, and the first of the ranks ends last.
    assert rank1[2:] == [True, "first", (False, None, "first", True)]
    assert rank0[2:] == ["first", (False, None, "first", False)]


def test_a_rank_that_says_nothing_is_silent_from_the_first_question_on(pools):
    first, later, spoken = pools(2).run(hang_ranks.silent_ranks, 4.5)[0]
    assert first == spoken == [0.0, 0.0]
    assert later[0] == 0.0
    assert 4.5 <= later[1] < 60.0


def test_an_error_of_rank_0_is_told_before_it_leaves(pools):
    (_, waited_s), (told, _) = pools(2).run(hang_ranks.leaves)
    assert told.startswith("rank 0 has raised ValueError: my error, in ")
    assert "hang_ranks.py:" in told
    assert told.endswith(" in leaves, at train, step 3")
    assert 0.4 < waited_s < 5.0


def test_a_rank_that_destroys_its_groups_in_a_run_is_named():
    (told, own), (says, again) = run_ranks(hang_ranks.destroys, 2)
    assert says.startswith("has destroyed its process groups in the run, in tests/comm/hangs/hang_ranks.py:")
    assert says.endswith(" in destroys, at train, step 3")
    assert told == f"rank 1 {says}"
    assert (own, again) == ("", "")


def test_a_rank_whose_script_fails_behind_a_run_is_named_where_others_wait_for_it():
    (told, at_end), _ = run_ranks(hang_ranks.fails_behind_a_run, 2)
    why = "has raised KeyError: 'behind the fit', in tests/comm/hangs/hang_ranks.py:"
    assert told.startswith(f"rank 1 {why}"), told
    assert told.endswith(" in fails_behind_a_run, behind run 1"), told
    assert at_end.startswith(f"rank 1 {why}"), at_end


def test_a_wait_for_something_else_than_a_rank_is_told_once(pools):
    for rank, said in enumerate(pools(2).run(hang_ranks.waits_for_no_rank)):
        assert len(said) == 1
        assert said[0].startswith(
            f"sequence_parallel: rank {rank} is in no collective, but in tests/comm/hangs/hang_ranks.py:"
        )
        assert " in waits_for_no_rank, at train, step 3, for " in said[0]
        assert said[0].endswith("It waits there, and no rank for it yet: no time limit ends that.")


@pytest.mark.slow
def test_a_run_without_faults_pays_milliseconds(pools):
    for sleeping_s, computing_s in pools(2).run(hang_ranks.cost_s, 60.0):
        print(
            f"CPU-seconds in 60 s: {sleeping_s:.4f} beside a thread that sleeps, {computing_s:.4f} beside one that computes"
        )
        assert max(sleeping_s, computing_s) < 0.2
