"""Which ranks are slow, by how often looks find each in a collective; and on real ranks, whose looks are given to them."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_sp.comm.hangs.slow_ranks import Looks, slow_ranks, told_slow
from tests.comm.hangs import hang_ranks


def looks(*waits, num=300):
    return [
        Looks(rank=rank, run=1, window=1, num=num, num_waits=each, lines=(("loader.py:5 in read", num - each),))
        for rank, each in enumerate(waits)
    ]


@pytest.mark.parametrize(
    ("waits", "slow"),
    [
        ((150, 3), [1]),
        ((140, 150, 10, 145), [2]),
        ((10, 150, 12, 145), [0, 2]),
        ((150, 65, 145, 140), [1]),
        ((150, 90, 145, 140), []),  # a sixth of a step: chance alone may bring as much
        ((3, 150, 5, 4), []),  # one that has less to do than the others: nobody waits for one rank
        ((0, 0), []),
        ((300, 300), []),
    ],
)
def test_ranks_that_are_found_in_a_collective_more_seldom_than_all_others_are_slow(waits, slow):
    assert slow_ranks(looks(*waits)) == slow


def test_few_looks_tell_only_what_they_tell_beyond_chance():
    assert slow_ranks(looks(20, 1, num=20)) == [1]
    assert slow_ranks(looks(14, 4, num=20)) == []
    assert slow_ranks(looks(1800, 1300, num=3600)) == [1]
    assert slow_ranks(looks(1800, 1500, num=3600)) == []  # less than a tenth of a step


def test_no_rank_of_many_is_named_by_chance():
    draws = np.random.default_rng(0)
    for share in (0.02, 0.3, 0.5, 0.9):
        for _ in range(50):
            assert slow_ranks(looks(*draws.binomial(300, share, 1024).tolist())) == []


def test_a_slow_rank_is_told_with_its_lines_and_how_long_the_others_wait():
    told = told_slow(looks(150, 3, 144), [1], 300.0)
    assert told.startswith(
        "rank 1 is slow, and the others wait: in the last 300 s 1% of the looks found it in a collective, and 48% to 50% found the others there."
    )
    assert told.endswith("was found:\n    99% of the looks in loader.py:5 in read")
    assert told_slow(looks(3, 150, 3, 144), [0, 2], 300.0).startswith("ranks 0, 2 are slow, and the others wait: ")


def test_a_look_goes_through_the_store_as_it_is():
    one = looks(3)[0]
    assert Looks.decode(one.encode()) == one


def test_rank_0_names_a_slow_rank_once_and_again_when_it_was_not_slow_for_a_window(pools):
    found, nothing = pools(2).run(hang_ranks.slow_in_windows)
    assert set(nothing) == {""}
    first, *well, slow = found
    for told in (first, slow):
        assert told.startswith("rank 1 is slow, and the others wait: "), told
        assert "% of the looks in train.py:9 in read" in told
    assert set(well) == {""}


def test_a_rank_that_is_a_little_slow_is_named_by_more_windows(pools):
    said = pools(2).run(hang_ranks.slow_by_a_little)[0]
    assert said[0] == ""
    assert sum(bool(each) for each in said) == 1, said
    assert "rank 1 is slow, and the others wait: in the last " in "".join(said)


def test_a_window_of_a_rank_is_compared_once(pools):
    assert pools(2).run(hang_ranks.without_new_windows)[0] == [""] * 8
