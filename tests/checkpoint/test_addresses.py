"""Checkpoints at addresses, through fsspec: one file, written and read by Lightning's CheckpointIO; a folder is refused before the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import pytest

from lightning_sp import SequenceParallelError
from lightning_sp.checkpoint import latest_checkpoint
from lightning_sp.checkpoint.folder import local_path
from tests.checkpoint import address_ranks as ranks
from tests.checkpoint.test_replace import save


def test_a_run_goes_on_from_a_file_at_an_address(pools: Any):
    (found,) = pools(1).run(ranks.resumed)
    assert found["latest"].startswith("memory://runs/") or found["latest"].startswith("memory:///runs/")
    assert found["names"] == ["/runs/last.ckpt"]
    assert found["steps"] == 4
    assert found["weights"] <= 1e-12


def test_a_folder_at_an_address_is_refused_before_the_run(pools: Any):
    first, second = pools(2).run(ranks.refused)
    assert first == second
    for each in first:
        assert "with save_distributed_checkpoint=True each rank writes files of a folder" in each["said"]
        assert "SequenceParallelStrategy(save_distributed_checkpoint=False) writes one file there" in each["said"]
        assert each["steps"] == 0


def test_a_file_address_is_a_path(tmp_path: Path):
    save(tmp_path / "a.ckpt", 1.0)
    assert latest_checkpoint(f"file://{tmp_path}") == tmp_path / "a.ckpt"
    assert local_path(f"file://{tmp_path}") == tmp_path
    with pytest.raises(SequenceParallelError, match="an address is not supported here: copy what lies there"):
        local_path("s3://bucket/a.ckpt")


def test_the_newest_file_at_an_address_is_found():
    files = fsspec.filesystem("memory")
    assert latest_checkpoint("memory://nowhere") is None
    for name in ("newest/b.ckpt", "newest/deep/a.ckpt", "newest/c.txt"):
        files.pipe(f"/{name}", b"x")
    assert latest_checkpoint("memory://newest") == files.unstrip_protocol("/newest/deep/a.ckpt")
