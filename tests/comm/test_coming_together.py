"""Ranks come together before what all of them call. What a rank that is alone there is told: tests/faults_run."""

from __future__ import annotations

from tests.comm import coming_together_ranks as ranks


def test_all_wait_for_the_last_one_and_leave_nothing_behind(pools):
    first, second = pools(2).run(ranks.meet)
    assert first[0] > 0.25
    assert second[0] < first[0]
    assert first[1] == [False, False, True]


def test_a_save_a_gather_of_weights_and_a_skipped_epoch_are_of_all_ranks(pools, tmp_path):
    for answer in pools(2).run(ranks.places, str(tmp_path / "x.ckpt")):
        assert answer == {"skips": 1, "saves": 1, "gathers": 1, "steps": 1}
