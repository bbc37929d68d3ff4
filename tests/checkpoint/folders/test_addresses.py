"""Checkpoints at addresses, through fsspec: a folder of all ranks, made whole by its manifest; or one file of Lightning's CheckpointIO."""

from __future__ import annotations

import json
import shutil
import zlib
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from lightning_sp import SequenceParallelError, export_checkpoint
from lightning_sp.checkpoint import latest_checkpoint, read_checkpoint_folder, remove_expired, save_checkpoint
from lightning_sp.checkpoint import save as saving
from lightning_sp.checkpoint.folders.address import Address
from lightning_sp.checkpoint.folders.folder import MANIFEST, META, METADATA, local_path
from tests.checkpoint.folders import address_ranks as ranks
from tests.checkpoint.folders.test_expired import HOUR
from tests.checkpoint.folders.test_replace import save as save_at_path

MEMORY = fsspec.filesystem("memory")


def save(address: str, value: float, *, as_folder: bool = True) -> None:
    """Write a checkpoint in one process."""
    checkpoint = {"state_dict": {"w": torch.full((2,), value)}, "loops": {}}
    save_checkpoint(checkpoint, address, as_folder=as_folder, write=_write)


def _write(checkpoint: dict[str, Any], address: str) -> None:
    with fsspec.open(address, "wb") as stream:
        torch.save(checkpoint, stream)


def value(address: str) -> float:
    return float(read_checkpoint_folder(address)["state_dict"]["w"][0])


def objects(name: str) -> list[str]:
    """Return the names below one in memory, that of a save as `SAVE`."""
    found = [each.removeprefix(f"/{name}/") for each in MEMORY.find(f"/{name}")]
    return sorted("/".join("SAVE" if part.startswith("save-") else part for part in each.split("/")) for each in found)


def test_a_run_goes_on_from_a_file_at_an_address(pools: Any):
    (found,) = pools(1).run(ranks.resumed, "memory://of_a_file", False)
    assert found["latest"].startswith("memory://")
    assert found["names"] == ["last.ckpt"]
    assert found["steps"] == 4
    assert found["weights"] <= 1e-12


def test_a_run_goes_on_from_a_folder_that_two_ranks_write_at_an_address(pools: Any, tmp_path: Path):
    for found in pools(2).run(ranks.resumed, f"folder_store://{tmp_path}", True):
        assert found["latest"] == f"folder_store://{tmp_path}/runs/last.ckpt"
        saves = {each.split("/")[1] for each in found["names"]} - {MANIFEST}
        assert len(saves) == 1  # of the later run alone
        (own,) = saves
        files = [METADATA, "__0_0.distcp", "__1_0.distcp", META]
        assert found["names"] == ["last.ckpt/manifest.json", *(f"last.ckpt/{own}/{each}" for each in sorted(files))]
        assert found["steps"] == 4
        assert found["weights"] <= 1e-12
        assert found["read"] == 4


def test_a_store_that_ranks_do_not_share_is_refused_and_nothing_is_left(pools: Any):
    first, second = pools(2).run(ranks.refused)
    assert first["said"] == second["said"]
    assert "rank 0 does not see 1 of 4 files that other ranks wrote (__1_0.distcp, ...)" in first["said"]
    assert "or in a store, that all nodes share" in first["said"]
    assert first["left"] == []


def test_a_newer_one_takes_the_name_and_nothing_is_left():
    for number in (1.0, 2.0):
        save("memory://newer/last.ckpt", number)
        assert value("memory://newer/last.ckpt") == number
        assert objects("newer") == [
            "last.ckpt/SAVE/.metadata",
            "last.ckpt/SAVE/__0_0.distcp",
            "last.ckpt/SAVE/meta.pt",
            "last.ckpt/manifest.json",
        ]


@pytest.mark.parametrize("at", ["dcp_save", "_written_files", "write_manifest_of_save"])
def test_the_name_is_of_a_whole_one_at_every_moment(monkeypatch: Any, at: str):
    """An error, or a kill, after each of a save's parts."""
    path = f"memory://moment/{at}.ckpt"
    save(path, 1.0)
    before, original = objects(f"moment/{at}.ckpt"), getattr(saving, at)

    def failing(error: BaseException, is_done: bool) -> Any:
        def act(*given: Any, **options: Any) -> Any:
            if is_done:
                original(*given, **options)
            raise error

        return act

    monkeypatch.setattr(saving, at, failing(OSError("the store is gone"), is_done=at != "write_manifest_of_save"))
    with pytest.raises(SequenceParallelError, match=r"could not be written: .*OSError: the store is gone"):
        save(path, 2.0)
    assert value(path) == 1.0
    assert objects(f"moment/{at}.ckpt") == before
    monkeypatch.setattr(saving, at, failing(KeyboardInterrupt(), is_done=at != "write_manifest_of_save"))
    with pytest.raises(KeyboardInterrupt):
        save(path, 3.0)
    assert value(path) == 1.0
    monkeypatch.setattr(saving, at, original)
    save(path, 4.0)
    assert value(path) == 4.0
    assert objects(f"moment/{at}.ckpt") == before


def test_an_error_of_the_store_after_the_switch_leaves_the_newer_one(monkeypatch: Any):
    save("memory://after/a.ckpt", 1.0)
    original = saving.write_manifest_of_save

    def late(*given: Any) -> None:
        original(*given)
        raise OSError("timed out")

    monkeypatch.setattr(saving, "write_manifest_of_save", late)
    with pytest.raises(SequenceParallelError, match="OSError: timed out"):
        save("memory://after/a.ckpt", 2.0)
    assert value("memory://after/a.ckpt") == 2.0


def test_what_is_half_written_or_damaged_is_said_and_passed_over():
    for number, name in enumerate(("whole", "torn", "half")):
        save(f"memory://damaged/{name}.ckpt", float(number))
    (part,) = [each for each in MEMORY.find("/damaged/torn.ckpt") if each.endswith("distcp")]
    MEMORY.pipe(part, MEMORY.cat(part)[:-1])
    MEMORY.rm(f"/damaged/half.ckpt/{MANIFEST}")
    with pytest.raises(SequenceParallelError, match=r"is damaged: __0_0\.distcp has \d+ bytes, \d+ were written"):
        value("memory://damaged/torn.ckpt")
    with pytest.raises(
        SequenceParallelError, match=r"half\.ckpt is half-written: it holds 1 files and no manifest\.json"
    ):
        value("memory://damaged/half.ckpt")
    with pytest.raises(SequenceParallelError, match="does not exist"):
        value("memory://damaged/absent.ckpt")
    assert latest_checkpoint("memory://damaged") == MEMORY.unstrip_protocol("/damaged/whole.ckpt")


@pytest.mark.parametrize("save_name", ["../whole.ckpt", "/etc", "a/b"])
def test_a_manifest_that_leads_elsewhere_is_refused(save_name: str):
    save("memory://elsewhere/a.ckpt", 1.0)
    manifest = json.loads(MEMORY.cat(f"/elsewhere/a.ckpt/{MANIFEST}"))
    MEMORY.pipe(f"/elsewhere/a.ckpt/{MANIFEST}", json.dumps({**manifest, "save": save_name}).encode())
    with pytest.raises(SequenceParallelError, match="files lie in the folder itself"):
        value("memory://elsewhere/a.ckpt")


def test_what_names_code_is_not_unpickled():
    save("memory://code/a.ckpt", 1.0)
    (of,) = [each for each in MEMORY.find("/code") if each.endswith(METADATA)]
    hostile = b"cos\nsystem\n(S'true'\ntR."
    MEMORY.pipe(of, hostile)
    manifest = json.loads(MEMORY.cat(f"/code/a.ckpt/{MANIFEST}"))
    manifest["files"][METADATA] = [len(hostile), zlib.crc32(hostile)]
    MEMORY.pipe(f"/code/a.ckpt/{MANIFEST}", json.dumps(manifest).encode())
    with pytest.raises(SequenceParallelError, match=r"names os\.system, which is no part of a distributed checkpoint"):
        value("memory://code/a.ckpt")


def test_a_file_and_a_folder_of_one_name_are_refused():
    save("memory://both/a.ckpt", 1.0)
    with pytest.raises(SequenceParallelError, match="a folder of that name is there, and this save is one file"):
        save("memory://both/a.ckpt", 2.0, as_folder=False)
    save("memory://both/b.ckpt", 1.0, as_folder=False)
    with pytest.raises(SequenceParallelError, match="one file of that name is there, and this save is a folder"):
        save("memory://both/b.ckpt", 2.0)
    MEMORY.pipe("/both/c.ckpt/notes.txt", b"of the user's")
    with pytest.raises(SequenceParallelError, match=r"1 names are there and are no checkpoint \(notes\.txt\)"):
        save("memory://both/c.ckpt", 2.0)


def test_a_copy_on_a_file_system_and_an_export(tmp_path: Path):
    address = f"folder_store://{tmp_path}/store/a.ckpt"
    save(address, 3.0)
    shutil.copytree(tmp_path / "store/a.ckpt", tmp_path / "copy.ckpt")
    assert value(str(tmp_path / "copy.ckpt")) == 3.0
    assert latest_checkpoint(tmp_path / "copy.ckpt") == tmp_path / "copy.ckpt"
    export_checkpoint(address, tmp_path / "weights.pt")
    assert torch.load(tmp_path / "weights.pt")["w"].tolist() == [3.0, 3.0]


def test_a_file_address_is_a_path(tmp_path: Path):
    save_at_path(tmp_path / "a.ckpt", 1.0)
    assert latest_checkpoint(f"file://{tmp_path}") == tmp_path / "a.ckpt"
    assert local_path(f"file://{tmp_path}") == tmp_path
    with pytest.raises(SequenceParallelError, match="an address is not supported here: copy what lies there"):
        local_path("s3://bucket/a.ckpt")


def test_an_address_that_fsspec_does_not_know_is_refused():
    with pytest.raises(
        SequenceParallelError, match=r"address 'nowhere://a\.ckpt' cannot be opened by fsspec: .*nowhere"
    ):
        save("nowhere://a.ckpt", 1.0)


def test_the_newest_at_an_address_is_found_and_old_ones_go():
    assert latest_checkpoint("memory://nowhere") is None
    save("memory://newest/a.ckpt", 1.0)
    for name in ("b.ckpt", "deep/c.ckpt", "d.txt"):
        MEMORY.pipe(f"/newest/{name}", b"x")
    assert latest_checkpoint("memory://newest") == MEMORY.unstrip_protocol("/newest/deep/c.ckpt")
    for each in MEMORY.find("/newest/a.ckpt"):
        MEMORY.store[each].modified = MEMORY.store[each].modified.replace(year=2020)
    assert [each.rpartition("/")[2] for each in remove_expired("memory://newest", HOUR, keep=())] == ["a.ckpt"]
    assert objects("newest") == ["b.ckpt", "d.txt", "deep/c.ckpt"]


def test_addresses_are_told_apart_and_a_folder_is_not_in_itself(monkeypatch):
    folder = Address("memory://apart/runs")
    assert folder == Address("memory://apart/runs/")
    assert folder != Address("memory://apart/others")
    # Some stores list a folder's own object beside what lies in it.
    monkeypatch.setattr(folder._files, "ls", lambda key, detail: [f"{key}/", f"{key}/a", f"{key}/b/"])
    assert [each.name for each in folder.iterdir()] == ["a", "b"]
