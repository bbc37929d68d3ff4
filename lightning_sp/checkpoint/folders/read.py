"""Reading a checkpoint's file, or what its folder holds besides tensors."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from lightning_sp.checkpoint.folders.address import Location
from lightning_sp.checkpoint.folders.folder import META, METADATA, Contents, damage, read_manifest
from lightning_sp.checkpoint.folders.metadata import read_metadata
from lightning_sp.errors import SequenceParallelError, told_error

_OF_WEIGHTS = (
    "to start from exported weights, load them into the model before the Trainer gets it, with model.load_state_dict"
)


def read_file(path: Path, weights_only: bool | None = None) -> dict[str, Any]:
    """Return the checkpoint in a single file, its tensors mapped from it; of plain values alone, unless the user says or torch's environment.

    Raises:
        SequenceParallelError: the file is damaged, or no checkpoint of a Trainer.
    """
    if (path.parent / METADATA).is_file():
        raise SequenceParallelError(f"{path} is a file of the checkpoint folder {path.parent}: give the folder")
    if path.suffix == ".safetensors":
        raise SequenceParallelError(f"{path} is no checkpoint of a Trainer but weights: {_OF_WEIGHTS}")
    try:
        checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
    except (RuntimeError, pickle.UnpicklingError, EOFError, zipfile.BadZipFile, OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        trusted = (
            "; trainer.fit(..., weights_only=False) reads others, if you trust who wrote it"
            if weights_only is not False
            else ""
        )
        raise SequenceParallelError(
            f"checkpoint {path} ({path.stat().st_size} bytes) cannot be read: damaged, half-written or not plain values alone: {reason}"
            f"{trusted if isinstance(error, pickle.UnpicklingError) else ''}"
        ) from error
    _check_entries(checkpoint, path)
    return checkpoint


def read_by(read: Callable[..., Any], path: Path | str, weights_only: bool | None = None) -> dict[str, Any]:
    """Return the checkpoint that a user's plugin reads.

    Raises:
        SequenceParallelError: it fails, or gives no checkpoint of a Trainer.
    """
    try:
        checkpoint: dict[str, Any] = read(str(path), weights_only=weights_only)
    except Exception as error:  # of a user's plugin any; the other ranks would wait
        raise SequenceParallelError(f"checkpoint {path} cannot be read: {told_error(error)}") from error
    _check_entries(checkpoint, path)
    return checkpoint


def _check_entries(checkpoint: Any, path: Path | str) -> None:
    if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint or "loops" not in checkpoint:
        raise SequenceParallelError(
            f"{path} is no checkpoint of a Trainer (it has no state_dict and loops): {_OF_WEIGHTS}"
        )


def read_folder(path: Location) -> tuple[dict[str, Any], Metadata, Contents]:
    """Return what a checkpoint folder holds besides tensors, DCP's description of these, and its files. Nothing that is not plain is unpickled.

    Raises:
        SequenceParallelError: the folder is missing, half-written or damaged, or holds what a save of this strategy does not write.
    """
    contents = read_manifest(path)
    if wrong := damage(contents, (META, METADATA)):
        raise SequenceParallelError(wrong)
    metadata = read_metadata(contents)
    try:
        # Whatever a Trainer was told: a save writes plain values alone.
        checkpoint: dict[str, Any] = torch.load(
            io.BytesIO((contents.folder / META).read_bytes()), map_location="cpu", weights_only=True
        )
    except Exception as error:  # of a damaged or foreign file any
        reason = " ".join(str(error).split())
        raise SequenceParallelError(
            f"checkpoint {path}: {META} holds more than plain values, or is damaged; it is not loaded, for a pickle runs what it names: {reason}"
        ) from error
    if not isinstance(checkpoint, dict):
        raise SequenceParallelError(
            f"checkpoint {path}: {META} holds a {type(checkpoint).__name__}, not a Trainer's state"
        )
    return checkpoint, metadata, contents
