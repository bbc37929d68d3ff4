"""The newest complete checkpoint of a folder, and room for the next one."""

from __future__ import annotations

import os
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import torch

from lightning_sp import SequenceParallelError
from lightning_sp.checkpoint import latest_checkpoint
from lightning_sp.checkpoint.folders.folder import MANIFEST, partial_path, replaced_path
from tests.checkpoint.folders.test_replace import save, value

USAGE = namedtuple("USAGE", "total used free")


def aged(path: Path, seconds: int) -> None:
    """Let a checkpoint have been written at a time."""
    file = path / MANIFEST if path.is_dir() else path
    os.utime(file, (seconds, seconds))


def test_the_newest_complete_one_is_found(tmp_path):
    assert latest_checkpoint(tmp_path) is None
    assert latest_checkpoint(tmp_path / "absent") is None
    for number, name in enumerate(("version_0/a.ckpt", "version_1/deep/b.ckpt", "version_1/c.ckpt")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        save(tmp_path / name, float(number))
        aged(tmp_path / name, 1000 + number)
    assert latest_checkpoint(tmp_path) == tmp_path / "version_1/c.ckpt"
    assert latest_checkpoint(str(tmp_path / "version_1/deep")) == tmp_path / "version_1/deep/b.ckpt"
    # Half-written: a file is missing, or the manifest.
    next(each for each in (tmp_path / "version_1/c.ckpt").iterdir() if each.suffix == ".distcp").unlink()
    assert latest_checkpoint(tmp_path) == tmp_path / "version_1/deep/b.ckpt"
    (tmp_path / "version_1/deep/b.ckpt" / MANIFEST).unlink()
    assert latest_checkpoint(tmp_path) == tmp_path / "version_0/a.ckpt"
    # A file of plain Lightning's, newer.
    torch.save({}, tmp_path / "plain.ckpt")
    assert latest_checkpoint(tmp_path) == tmp_path / "plain.ckpt"
    (tmp_path / "z.ckpt").symlink_to(tmp_path / "plain.ckpt")  # save_last="link"
    assert latest_checkpoint(tmp_path) == tmp_path / "plain.ckpt"


def test_one_that_a_stopped_save_left_without_its_name_is_found(tmp_path):
    save(tmp_path / "last.ckpt", 3.0)
    (tmp_path / "last.ckpt").rename(partial_path(tmp_path / "last.ckpt"))
    assert latest_checkpoint(tmp_path) == tmp_path / "last.ckpt"
    assert value(tmp_path / "last.ckpt") == 3.0


def test_one_that_is_being_replaced_is_no_checkpoint(tmp_path):
    """A save beside this has moved the old one aside: it is about to be deleted."""
    save(tmp_path / "a.ckpt", 1.0)
    save(tmp_path / "last.ckpt", 2.0)
    shutil.copytree(tmp_path / "last.ckpt", replaced_path(tmp_path / "last.ckpt"))
    aged(tmp_path / "a.ckpt", 1000)
    aged(replaced_path(tmp_path / "last.ckpt"), 3000)
    aged(tmp_path / "last.ckpt", 2000)
    assert latest_checkpoint(tmp_path) == tmp_path / "last.ckpt"


def test_a_save_without_room_is_refused_before_it_begins(tmp_path, monkeypatch):
    save(tmp_path / "last.ckpt", 1.0)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: USAGE(2**40, 2**40, 7))  # two floats are 8 bytes
    with pytest.raises(
        SequenceParallelError, match=r"needs 8 bytes \(0\.00 GiB\), and its file system has 7 free: nothing was written"
    ):
        save(tmp_path / "last.ckpt", 2.0)
    assert [each.name for each in tmp_path.iterdir()] == ["last.ckpt"]
    assert value(tmp_path / "last.ckpt") == 1.0
    monkeypatch.setattr(shutil, "disk_usage", lambda path: USAGE(2**40, 2**40, 8))
    save(tmp_path / "last.ckpt", 2.0)
    assert value(tmp_path / "last.ckpt") == 2.0
