"""Export: a checkpoint as a plain state dict, in one process without a GPU or a process group."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from lightning_sp.checkpoint.contents.frozen import refuse_part_of_model
from lightning_sp.checkpoint.contents.plain import OBJECTS
from lightning_sp.checkpoint.contents.stored_elsewhere import with_memory
from lightning_sp.checkpoint.folders.address import Location
from lightning_sp.checkpoint.folders.folder import (
    MANIFEST,
    META,
    Contents,
    damage,
    first_failure,
    folder_at,
    local_path,
    located,
    partial_path,
    readable,
)
from lightning_sp.checkpoint.folders.metadata import checked_reader
from lightning_sp.checkpoint.folders.read import read_file, read_folder
from lightning_sp.errors import SequenceParallelError, told_error
from lightning_sp.weights.single_numbers import SINGLE_NUMBERS

FORMATS = (".pt", ".safetensors")


def export_checkpoint(path: str | Path, out: str | Path, *, prefix: str = "", dtype: torch.dtype | None = None) -> Path:
    """Write a checkpoint's model as a plain state dict that loads into the unwrapped model with ``strict=True``.

    Args:
        path: a checkpoint folder or file of any degrees.
        out: a .pt file (torch.save of a state dict) or a .safetensors file, which has no room for what `get_extra_state` returned; replaced when
            it is there.
        prefix: keep only the tensors of that part of the LightningModule, and strip it: ``"model."`` gives the state dict of
            ``module.model``.
        dtype: cast floating-point tensors; None keeps them as trained.

    Returns:
        The path written. Tied weights are there under each of their names, each with its own memory.

    Raises:
        SequenceParallelError: the checkpoint is missing, half-written or damaged; nothing has that prefix, or its base was left out;
            `out` has another suffix, or cannot be written.
    """
    source, target = readable(path), local_path(out)
    if target.suffix not in FORMATS:
        raise SequenceParallelError(f"export to {target.name!r}: must end in one of {', '.join(FORMATS)}")
    if source.exists():
        refuse_part_of_model(source, _checkpoint(source), prefix)
    state = read_model(source, prefix)
    if dtype is not None:
        state = {name: _cast(value, dtype) for name, value in state.items()}
    temporary = partial_path(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _write(state, temporary, target.suffix)
        temporary.replace(target)
    except Exception as error:  # a full disk: of torch and of safetensors in classes of their own
        raise SequenceParallelError(f"export to {target} could not be written: {told_error(error)}") from error
    return target


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def _write(state: dict[str, Any], path: Path, suffix: str) -> None:
    if suffix == ".pt":
        torch.save(state, path)
        return
    from safetensors.torch import save_file  # noqa: PLC0415 - its import takes a while, and export alone needs it

    tensors = {name: value.contiguous() for name, value in state.items() if isinstance(value, Tensor)}
    save_file(tensors, path, metadata={"format": "pt"})


def _checkpoint(source: Location) -> dict[str, Any]:
    return read_folder(source)[0] if _is_folder(source) else read_file(_file(source))


def _is_folder(source: Location) -> bool:
    return not source.is_file() if isinstance(source, Path) else folder_at(str(source)) is not None


def _file(source: Location) -> Path:
    """Return a file's path; one file at an address is refused."""
    return local_path(str(source))


def is_checkpoint_folder(path: str | Path) -> bool:
    """Return whether a path is of a folder that the strategy wrote, or began to write."""
    folder = located(path)
    if isinstance(folder, str):
        return folder_at(folder) is not None
    return any((folder / name).is_file() for name in (META, MANIFEST))


def read_checkpoint_folder(path: str | Path) -> dict[str, Any]:
    """Return a checkpoint folder as the dict that Lightning writes to a file, but for the optimizers' states.

    Raises:
        SequenceParallelError: it is half-written or damaged.
    """
    source = readable(path)
    read = read_folder(source)
    checkpoint, metadata, _ = read
    others: dict[str, Any] = {}
    rest = {name: value for name, value in checkpoint.items() if name != "optimizer_states"}
    checkpoint.update(with_memory(rest, metadata.state_dict_metadata, None, others))
    state = _whole_model(source, read, "", others)
    return {**{k: v for k, v in checkpoint.items() if k not in (SINGLE_NUMBERS, OBJECTS)}, "state_dict": state}


def read_model(source: Location, prefix: str = "") -> dict[str, Any]:
    """Return the whole model's state of a checkpoint folder or file, each tensor in memory of its own."""
    if not _is_folder(source):
        values: dict[str, Any] = read_file(_file(source))["state_dict"]
        whole = {name: value.clone() if isinstance(value, Tensor) else value for name, value in values.items()}
        return _strip(source, whole, prefix)
    return _whole_model(source, read_folder(source), prefix, {})


def _whole_model(
    source: Location, read: tuple[dict[str, Any], Metadata, Contents], prefix: str, others: dict[str, Any]
) -> dict[str, Any]:
    """Return the model of a folder, and read other tensors of it, by their names, with it."""
    checkpoint, metadata, contents = read
    if wrong := damage(contents, contents.files):
        raise SequenceParallelError(wrong)
    key, objects = "state_dict.", checkpoint.get(OBJECTS) or {}
    stored = {name: of for name, of in metadata.state_dict_metadata.items() if name.startswith(key)}
    _strip(source, {**{name[len(key) :]: name for name in stored}, **objects}, prefix)  # refuse before reading
    wanted = {
        name: torch.empty(tuple(of.size), dtype=of.properties.dtype)  # type: ignore[union-attr]
        for name, of in stored.items()
        if name[len(key) :].startswith(prefix)
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        try:
            dcp_load({**wanted, **others}, storage_reader=checked_reader(contents.folder, metadata), no_dist=True)
        except (Exception, CheckpointException) as error:  # of DCP's, a BaseException
            raise SequenceParallelError(f"checkpoint {source} could not be read: {first_failure(error)}") from error
    state = {name[len(key) :]: value for name, value in wanted.items()}
    for name in state.keys() & {*checkpoint.get(SINGLE_NUMBERS, ())}:
        state[name] = state[name].reshape(())
    return _strip(source, {**state, **objects}, prefix)


def _strip(source: Location, state: dict[str, Any], prefix: str) -> dict[str, Any]:
    selected = {name[len(prefix) :]: value for name, value in state.items() if name.startswith(prefix)}
    if not selected:
        heads = sorted({name.split(".")[0] + "." for name in state})
        raise SequenceParallelError(
            f"checkpoint {source}: no tensor's name begins with {prefix!r}; prefixes: {', '.join(heads[:8])}"
        )
    return selected
