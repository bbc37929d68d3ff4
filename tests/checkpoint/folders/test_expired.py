"""Checkpoints that are too old go; the newest complete one, what is half-written and what a link leads to stay."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import fsspec
import pytest

from lightning_sp.checkpoint import remove_expired
from lightning_sp.checkpoint.folders.folder import MANIFEST, partial_path, replaced_path
from tests.checkpoint.folders.test_latest import aged
from tests.checkpoint.folders.test_replace import save

HOUR = timedelta(hours=1)


def saved(folder: Path, **hours: float) -> None:
    """Save checkpoints of these hours."""
    for name, hour in hours.items():
        save(folder / f"{name}.ckpt", hour)
        aged(folder / f"{name}.ckpt", int(hour * 3600))


def names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


def test_what_is_older_than_the_newest_by_more_than_the_age_goes(tmp_path):
    saved(tmp_path, a=1, b=2, c=3, d=4)
    assert remove_expired(str(tmp_path), 2 * HOUR, keep=()) == [str(tmp_path / "a.ckpt")]
    assert names(tmp_path) == ["b.ckpt", "c.ckpt", "d.ckpt"]
    assert remove_expired(str(tmp_path), HOUR / 2, keep=[str(tmp_path / "b.ckpt")]) == [str(tmp_path / "c.ckpt")]
    assert names(tmp_path) == ["b.ckpt", "d.ckpt"]
    assert remove_expired(str(tmp_path / "absent"), HOUR, keep=()) == []


def test_the_newest_complete_one_stays_whatever_is_newer_and_half_written(tmp_path):
    saved(tmp_path, old=1, whole=2, torn=30, written=40, other=50)
    # Files of one are missing, one is being written, one is to be replaced: none of them counts, and none is touched.
    next(each for each in (tmp_path / "torn.ckpt").iterdir() if each.suffix == ".distcp").unlink()
    (tmp_path / "written.ckpt").rename(partial_path(tmp_path / "written.ckpt"))
    (tmp_path / "other.ckpt").rename(replaced_path(tmp_path / "other.ckpt"))
    assert remove_expired(str(tmp_path), HOUR / 2, keep=()) == [str(tmp_path / "old.ckpt")]
    assert names(tmp_path) == ["other.ckpt.replaced", "torn.ckpt", "whole.ckpt", "written.ckpt.partial"]


def test_files_count_and_folders_below_links_and_others_do_not(tmp_path):
    saved(tmp_path, linked=1, old=2, new=9)
    (tmp_path / "file.ckpt").write_bytes(b"of Lightning's")
    aged(tmp_path / "file.ckpt", 3 * 3600)
    (tmp_path / "link.ckpt").symlink_to(tmp_path / "linked.ckpt")
    (tmp_path / "of_another_run").mkdir()
    saved(tmp_path / "of_another_run", old=1)
    (tmp_path / "notes.txt").write_text("kept")
    gone = [str(tmp_path / "old.ckpt"), str(tmp_path / "file.ckpt")]
    assert remove_expired(f"file://{tmp_path}", HOUR, keep=()) == gone
    assert names(tmp_path) == ["link.ckpt", "linked.ckpt", "new.ckpt", "notes.txt", "of_another_run"]
    assert names(tmp_path / "of_another_run") == ["old.ckpt"]


def test_one_whose_removal_is_stopped_is_no_checkpoint(tmp_path, monkeypatch):
    saved(tmp_path, old=1, new=9)

    def full(path: Path) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("shutil.rmtree", full)
    with pytest.raises(OSError, match="Input/output error"):
        remove_expired(str(tmp_path), HOUR, keep=())
    assert not (tmp_path / "old.ckpt" / MANIFEST).exists()


def test_files_at_an_address():
    files = fsspec.filesystem("memory")
    for hour, name in enumerate(("a.ckpt", "b.ckpt", "c.ckpt", "deep/d.ckpt")):
        files.pipe(f"/expired/{name}", b"x")
        store = files.store[f"/expired/{name}"]
        store.modified = store.modified.replace(year=2020, day=1, hour=hour)
    gone = remove_expired("memory://expired", HOUR / 2, keep=["memory://expired/a.ckpt"])
    assert [each.rpartition("/")[2] for each in gone] == ["b.ckpt"]
    assert [each.rpartition("/")[2] for each in files.find("/expired")] == ["a.ckpt", "c.ckpt", "d.ckpt"]
