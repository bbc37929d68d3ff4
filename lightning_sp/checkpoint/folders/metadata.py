"""DCP's description of a checkpoint's tensors, read without running what it says.

`.metadata` is a pickle, and a pickle may name any function to be called. torch's own reader calls it. This one knows the plain values that
DCP writes, and nothing else; it opens only files of the folder that the manifest lists.
"""

from __future__ import annotations

import io
import math
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from lightning_sp.checkpoint.folders.address import Location
from lightning_sp.checkpoint.folders.folder import METADATA, Contents
from lightning_sp.errors import SequenceParallelError

_DCP = "torch.distributed.checkpoint.metadata"
_KNOWN = {
    (_DCP, "Metadata"),
    (_DCP, "MetadataIndex"),
    (_DCP, "StorageMeta"),
    (_DCP, "TensorProperties"),
    (_DCP, "TensorStorageMetadata"),
    (_DCP, "ChunkStorageMetadata"),
    (_DCP, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    # Where it was written; Python 3.13 has it in a module of its own.
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
}


def read_metadata(contents: Contents) -> Metadata:
    """Return what a checkpoint's folder says of its tensors.

    Args:
        contents: what its manifest says.

    Raises:
        SequenceParallelError: it is damaged, names a class or function that is not DCP's, describes what is no tensor, or lies in a file
            that the manifest does not list.
    """
    folder = contents.folder
    try:
        metadata = _Unpickler(folder, (folder / METADATA).read_bytes()).load()
    except SequenceParallelError:
        raise
    except Exception as error:  # of a damaged pickle any
        raise SequenceParallelError(
            f"checkpoint {folder} is damaged: {METADATA} cannot be read ({type(error).__name__}: {error}); resume from another checkpoint"
        ) from error
    if not isinstance(metadata, Metadata) or not isinstance(getattr(metadata, "state_dict_metadata", None), dict):
        raise SequenceParallelError(f"checkpoint {folder}: {METADATA} is no description of a distributed checkpoint")
    _check_tensors(folder, metadata)
    try:
        _check_places(contents, metadata)
    except (AttributeError, TypeError) as error:
        raise SequenceParallelError(
            f"checkpoint {folder} is damaged: {METADATA} says of a tensor less than a save does ({error}); resume from another checkpoint"
        ) from error
    return metadata


def _check_tensors(folder: Location, metadata: Metadata) -> None:
    for name, value in metadata.state_dict_metadata.items():
        if not isinstance(value, TensorStorageMetadata):
            raise SequenceParallelError(
                f"checkpoint {folder}: {METADATA} describes {name!r} as {type(value).__name__}: a save of this strategy holds tensors "
                "alone there, and what is none would be unpickled; resume from another checkpoint"
            )


def _check_places(contents: Contents, metadata: Metadata) -> None:
    """Refuse tensors in other files than the manifest's, and more of them than those files hold: memory is asked for by what this says."""
    folder, files = contents.folder, contents.files
    for info in (metadata.storage_data or {}).values():
        if info.relative_path not in files or getattr(info, "transform_descriptors", None):
            raise SequenceParallelError(
                f"checkpoint {folder}: {METADATA} places tensors in {info.relative_path!r}, which is no plain file that the manifest lists: it "
                "is not opened; resume from another checkpoint"
            )
    described = sum(_bytes_of(value) for value in metadata.state_dict_metadata.values())
    held = sum(size for size, _ in files.values())
    if not 0 <= described <= held:
        raise SequenceParallelError(
            f"checkpoint {folder} is damaged: {METADATA} describes tensors of {described} bytes, and the files hold {held}; resume from another "
            "checkpoint"
        )


def _bytes_of(tensor: Any) -> int:
    if any(size < 0 for size in tensor.size):
        return -1
    size_bytes: int = math.prod(tensor.size) * tensor.properties.dtype.itemsize
    return size_bytes


def checked_reader(folder: Location, metadata: Metadata) -> FileSystemReader:
    """Return DCP's reader of a folder whose description was checked.

    Args:
        folder: where the checkpoint's files lie.
        metadata: as `read_metadata` returned it.
    """
    return _CheckedReader(folder, metadata) if isinstance(folder, Path) else _CheckedStoreReader(str(folder), metadata)


class _CheckedReader(FileSystemReader):
    def __init__(self, folder: Path | str, metadata: Metadata) -> None:
        super().__init__(folder)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the description that was checked."""
        if self._metadata.storage_meta is not None:
            self._metadata.storage_meta.load_id = self.load_id
        return self._metadata


class _CheckedStoreReader(_CheckedReader, FsspecReader):
    """The same of a folder in a store of objects."""


class _Unpickler(pickle.Unpickler):
    """Knows DCP's plain values alone."""

    def __init__(self, folder: Location, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._folder = folder

    def find_class(self, module: str, name: str) -> Any:
        """Return a class of DCP's, or a dtype."""
        if (module, name) in _KNOWN:
            return super().find_class(module, name)
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        raise SequenceParallelError(
            f"checkpoint {self._folder}: {METADATA} names {module}.{name}, which is no part of a distributed checkpoint: it is not called, "
            "for a pickle runs what it names; do not load this folder, and ask who wrote it"
        )
