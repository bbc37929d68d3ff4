"""Checkpoints written while training goes on are those written at once; one that fails is an error, and loses nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint import background_ranks as ranks
from tests.slow import slow


def test_what_changes_after_a_save_has_begun_is_not_saved(pools: Any, tmp_path: Path):
    assert pools(2).run(ranks.copied, str(tmp_path)) == [[True, True]] * 2


def test_an_entry_that_one_rank_alone_has_is_said_not_to_be_stored(pools: Any, tmp_path: Path):
    (said,), none = pools(2).run(ranks.entries_of_one_rank, str(tmp_path))
    assert f"checkpoint {tmp_path}/a.ckpt does not hold mine of rank 1: rank 0's entries are stored" in said
    assert none == []


def test_an_older_checkpoint_goes_when_the_newer_one_is_complete(pools: Any, tmp_path: Path):
    first, second = pools(2).run(ranks.one_at_a_time, str(tmp_path))
    assert first == {
        "is_pending": True,
        "before": (False, []),
        # Of the same step, under another name.
        "may_follow": [True, False, False],
        "after": (True, [True]),
        "is_still_pending": False,
    }
    assert second == {"after": (True, []), "is_still_pending": False}


def test_a_rank_that_has_lost_another_does_not_wait_long_for_its_part(pools: Any, tmp_path: Path):
    first, second = pools(2).run(ranks.lost, str(tmp_path))
    assert 1 < first["seconds"] < 20  # of 60 where no rank is lost
    assert first["said"].startswith(
        f"sequence_parallel: checkpoint {tmp_path}/x.ckpt, written while training went on, could "
    )
    assert ": another rank, which has a part of it, is gone; the one before stays" in first["said"]
    assert second == {"said": "", "is_complete": True}


def test_one_that_fails_is_an_error_on_all_ranks_and_the_one_before_stays(pools: Any, tmp_path: Path):
    first, second = pools(2).run(ranks.failed, str(tmp_path))
    assert first == second
    assert first["removed"] == []
    assert first["is_whole"]
    assert first["left"] == ["x.ckpt"]
    words = f"checkpoint {tmp_path}/x.ckpt, written while training went on, could not be written: rank 0: FileNotFoundError:"
    assert first["words"].startswith(words)
    assert first["words"].endswith("the one before stays")


def test_what_is_written_at_once(pools: Any, tmp_path: Path):
    """A link to what is not there, a class that may read it, a node whose memory is short, what a user saves elsewhere, a hook that uploads."""
    for found in pools(2).run(ranks.written_at_once, str(tmp_path)):
        assert found == [True, *[False] * 3, *[False] * 4, False, True, False, False, *[False] * 4]


@pytest.mark.slow
def test_a_run_saves_the_same_and_trains_the_same(pools: Any, tmp_path: Path):
    for found in pools(2).run(ranks.whole_run, str(tmp_path)):
        assert found == {"same": True, "losses": True, "resumed": True}


def test_a_run_that_ends_by_an_error_waits_for_its_last_checkpoint(pools: Any, tmp_path: Path):
    assert pools(2).run(ranks.raised, str(tmp_path)) == [[f"step={step}.ckpt" for step in (1, 2, 3)]] * 2


@pytest.mark.parametrize("world", [*slow(1), 2])
def test_what_is_kept_is_what_is_kept_at_once(pools: Any, tmp_path: Path, world: int):
    for found in pools(world).run(ranks.kept, str(tmp_path)):
        assert found == ["epoch=0-step=6.ckpt", "last.ckpt"]
