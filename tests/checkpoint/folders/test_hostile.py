"""Checkpoint folders that somebody else wrote or changed: nothing of them runs, no file outside is opened."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from lightning_sp import SequenceParallelError, export_checkpoint
from lightning_sp.checkpoint import read_checkpoint_folder, save_checkpoint
from lightning_sp.checkpoint.folders.folder import checksum, read_manifest
from lightning_sp.checkpoint.folders.metadata import read_metadata
from lightning_sp.checkpoint.folders.read import read_file

WEIGHT = torch.arange(6.0).reshape(2, 3)


class Planted:
    """What a pickle calls when it is loaded."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.file}",)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "last.ckpt"
    save_checkpoint({"state_dict": {"weight": WEIGHT}, "loops": {}}, path, as_folder=True)
    return path


def write(folder: Path, name: str, data: bytes) -> None:
    """Change a file, and its line of the manifest: nothing else is amiss."""
    (folder / name).write_bytes(data)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][name] = list(checksum(folder / name))
    (folder / "manifest.json").write_text(json.dumps(manifest))


def refused(folder: Path, match: str) -> None:
    """Reading and exporting are refused alike."""
    with pytest.raises(SequenceParallelError, match=match):
        read_checkpoint_folder(folder)
    with pytest.raises(SequenceParallelError, match=match):
        export_checkpoint(folder, folder.parent / "out.pt")


def test_an_honest_folder_is_read(folder):
    assert torch.equal(read_checkpoint_folder(folder)["state_dict"]["weight"], WEIGHT)
    plain, checked = FileSystemReader(folder).read_metadata(), read_metadata(read_manifest(folder))
    assert checked.state_dict_metadata == plain.state_dict_metadata
    assert checked.storage_data == plain.storage_data


@pytest.mark.parametrize("name", [".metadata", "meta.pt"])
def test_what_a_pickle_calls_is_not_called(folder, name):
    ran = folder.parent / "it_ran"
    if name == "meta.pt":
        torch.save({"loops": Planted(ran)}, folder / name)
        data = (folder / name).read_bytes()
    else:
        metadata = FileSystemReader(folder).read_metadata()
        metadata.planner_data = Planted(ran)
        data = pickle.dumps(metadata)
    write(folder, name, data)
    refused(folder, r"posix\.system" if name == ".metadata" else "meta.pt holds more than plain values")
    assert not ran.exists()


def test_an_entry_that_is_no_tensor_is_not_unpickled(folder):
    metadata = FileSystemReader(folder).read_metadata()
    metadata.state_dict_metadata["state_dict.more"] = BytesStorageMetadata()
    write(folder, ".metadata", pickle.dumps(metadata))
    refused(folder, r"names torch\.distributed\.checkpoint\.metadata\.BytesStorageMetadata")


@pytest.mark.parametrize("data", [b"", b"\x80\x04K\x01.", b"not a pickle", b"\x80\x04("])
def test_a_damaged_description_is_named(folder, data):
    write(folder, ".metadata", data)
    refused(folder, r"\.metadata (cannot be read|is no description)")


@pytest.mark.parametrize("missing", ["state_dict_metadata", "size", "properties", "relative_path"])
def test_a_description_that_says_less_is_refused_by_name(folder, missing):
    metadata = FileSystemReader(folder).read_metadata()
    (tensor,) = metadata.state_dict_metadata.values()
    (place,) = metadata.storage_data.values()
    for each in (metadata, tensor, place):
        vars(each).pop(missing, None)
    write(folder, ".metadata", pickle.dumps(metadata))
    refused(folder, r"is no description of|says of a tensor less than a save does \(.* has no attribute")


@pytest.mark.parametrize("size", [(2**40,), (-1, -6)])
def test_more_tensors_than_the_files_hold_ask_for_no_memory(folder, size):
    metadata = FileSystemReader(folder).read_metadata()
    (tensor,) = metadata.state_dict_metadata.values()
    tensor.size = torch.Size(size)
    write(folder, ".metadata", pickle.dumps(metadata))
    refused(folder, r"describes tensors of (4398046511104|-1) bytes, and the files hold \d+")


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes]]:
    """A folder, and what its files held when it was written."""
    path = tmp_path_factory.mktemp("honest") / "last.ckpt"
    save_checkpoint({"state_dict": {"weight": WEIGHT}, "loops": {"a": [1, {"b": 2}]}}, path, as_folder=True)
    return path, {each.name: each.read_bytes() for each in path.iterdir()}


@given(
    name=st.sampled_from([".metadata", "__0_0.distcp", "manifest.json", "meta.pt"]),
    at=st.integers(0, 10**6),
    removed=st.integers(0, 20),
    added=st.binary(max_size=8),
    is_signed=st.booleans(),
)
def test_whatever_is_changed_is_refused_or_nothing_of_it_is_read(honest, name, at, removed, added, is_signed):
    """A disk that loses bits, and an author who makes the checksums fit."""
    folder, files = honest
    for each, content in files.items():
        (folder / each).write_bytes(content)
    start = at % len(files[name])
    changed = files[name][:start] + added + files[name][start + removed :]
    if is_signed and name != "manifest.json":
        write(folder, name, changed)
    else:
        (folder / name).write_bytes(changed)
    try:
        found = read_checkpoint_folder(folder)
    except SequenceParallelError:
        return
    assert is_signed or torch.equal(found["state_dict"]["weight"], WEIGHT)


@pytest.mark.parametrize("path", ["../elsewhere.distcp", "/etc/hostname", "unlisted.distcp"])
def test_tensors_elsewhere_are_not_opened(folder, path):
    metadata = FileSystemReader(folder).read_metadata()
    for info in metadata.storage_data.values():
        info.relative_path = path
    write(folder, ".metadata", pickle.dumps(metadata))
    refused(folder, f"places tensors in '{path}', which is no plain file that the manifest lists")


@pytest.mark.parametrize("name", ["../meta.pt", "/etc/hostname", "a/b", "..", ""])
def test_a_manifest_of_other_folders_is_refused(folder, name):
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][name] = [1, 1]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    refused(folder, "files lie in the folder itself")


def test_links_strangers_and_an_empty_manifest_are_refused(folder):
    (folder / "more.distcp").write_bytes(b"1")
    refused(folder, r"holds 1 files that its manifest does not list \(more.distcp\)")
    (folder / "more.distcp").unlink()
    (folder / ".DS_Store").touch()
    assert read_checkpoint_folder(folder)
    data = folder / "__0_0.distcp"
    data.rename(folder.parent / "elsewhere")
    data.symlink_to(folder.parent / "elsewhere")
    refused(folder, "__0_0.distcp is a symbolic link")
    (folder / "manifest.json").write_text('{"format": 1, "files": {}}')
    refused(folder, "its manifest lists 0 files and no meta.pt")


def test_a_file_with_other_values_names_the_argument_that_reads_it(tmp_path, monkeypatch):
    file = tmp_path / "x.ckpt"
    torch.save({"state_dict": {}, "loops": {}, "hyper_parameters": Path}, file)
    with pytest.raises(
        SequenceParallelError, match=r"not plain values alone: .*fit\(\.\.\., weights_only=False\) reads others"
    ):
        read_file(file)
    assert read_file(file, weights_only=False)["hyper_parameters"] is Path
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    with pytest.warns(UserWarning, match="TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"):
        assert read_file(file)["hyper_parameters"] is Path
    with pytest.raises(SequenceParallelError):
        read_file(file, weights_only=True)
