"""Saving: a DCP folder written by all ranks, or one whole file written by rank 0."""

from __future__ import annotations

import errno
import io
import os
import uuid
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.tensor import DTensor

from lightning_sp import comm
from lightning_sp.checkpoint.contents.plain import OBJECTS, SHARDED, STORED_AS, plain_checkpoint
from lightning_sp.checkpoint.folders.address import Address, Location
from lightning_sp.checkpoint.folders.folder import (
    MANIFEST,
    META,
    SAVE,
    check_target,
    check_target_at,
    checksum,
    first_failure,
    folder_at,
    partial_path,
    remove_incomplete,
    write_manifest,
    write_manifest_of_save,
)
from lightning_sp.checkpoint.folders.free_space import check_free_space
from lightning_sp.checkpoint.folders.replace import put_in_place
from lightning_sp.checkpoint.folders.writing import begin_file, begin_folder, end_writing
from lightning_sp.checkpoint.staged_folder import StagedFolder
from lightning_sp.errors import SequenceParallelError
from lightning_sp.weights.single_numbers import SINGLE_NUMBERS, in_own_shape, is_single_number

# Where nothing can be written, whatever room there is.
_OF_PLACE = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR)
_ELSEWHERE = (
    "; give a folder that every rank can write to: ModelCheckpoint(dirpath=...), or Trainer(default_root_dir=...)"
)


def save_checkpoint(
    checkpoint: dict[str, Any],
    path: Path | str,
    *,
    as_folder: bool,
    write: Callable[[dict[str, Any], str], None] | None = None,
    later: Callable[[StagedFolder], None] | None = None,
    group: ProcessGroup | None = None,
) -> list[str]:
    """Write Lightning's checkpoint; every rank calls it. At any moment `path` is the old checkpoint or the new one, never a part.

    Args:
        checkpoint: from ``dump_checkpoint``, its model and optimizers as `state` returns them.
        path: on a file system, or in a store (s3://...), that all ranks share; equal on all ranks.
        as_folder: a DCP folder (each rank writes its part), else one file in plain Lightning's format.
        write: on rank 0, in place of writing the file; of one at an address it must be given.
        later: takes a copy of the folder, to write it while training goes on; None writes it now, as is one in a store.
        group: the world, on a backend for host objects.

    Communicates: the entries' names; DCP's plan; for a file every sharded tensor, gathered one by one.

    Returns:
        The hyperparameters that were not plain and became text.

    Raises:
        SequenceParallelError: an entry cannot be stored, or a rank could not write.
    """
    rest = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
    if as_folder:
        rest[OBJECTS] = {name: each for name, each in checkpoint["state_dict"].items() if not isinstance(each, Tensor)}
    sharded: dict[str, DTensor] = {}
    plain, refused, described = plain_checkpoint(rest, sharded if as_folder else None)
    comm.agree(_refusal(path, refused), group)
    _warn_of_lost(path, comm.gather_objects([str(name) for name in rest], group))
    if as_folder:
        tensors = _folder_tensors(checkpoint, plain, sharded)
        if isinstance(path, Path):
            _save_folder(tensors, plain, path, later=later, group=group)
        else:
            _save_in_store(tensors, plain, path, group)
    else:
        _save_file(checkpoint, plain, path, write or _write_file, group)
    return described


def _warn_of_lost(path: Path | str, of_ranks: Sequence[Sequence[str]]) -> None:
    """Name entries that only other ranks have: what is no shard is stored as rank 0 has it."""
    lost = {rank: sorted({*names} - {*of_ranks[0]}) for rank, names in enumerate(of_ranks)}
    if said := "; ".join(f"{', '.join(names)} of rank {rank}" for rank, names in lost.items() if names):
        rank_zero_warn(
            f"checkpoint {path} does not hold {said}: rank 0's entries are stored, and it has none of that name; let on_save_checkpoint add "
            "them on all ranks, gathered if they differ (self.all_gather)"
        )


def _refusal(path: Path | str, refused: list[str]) -> str | None:
    if not refused:
        return None
    shown = "; ".join(refused[:3]) + (f"; and {len(refused) - 3} more" if len(refused) > 3 else "")
    return (
        f"checkpoint {path}: {len(refused)} entries are no plain values and would not load again (weights_only=True): {shown}; return numbers, "
        "strings, tensors and containers of these from state_dict, get_extra_state and on_save_checkpoint"
    )


def _save_folder(
    tensors: dict[str, Any],
    plain: dict[str, Any],
    path: Path,
    *,
    later: Callable[[StagedFolder], None] | None,
    group: ProcessGroup | None,
) -> None:
    staging, is_writer = partial_path(path), _is_writer(group)

    def prepare() -> None:
        check_target(path)
        check_free_space(path, (tensors, plain))
        begin_folder(staging)

    def complete() -> None:
        torch.save(plain, staging / META)
        write_manifest(staging, {**files, META: checksum(staging / META)})
        put_in_place(staging, path)

    _let_writer(is_writer, prepare, path, group)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            if later is not None:
                later(StagedFolder(tensors, plain, staging, path, group))
                return
            dcp_save(tensors, storage_writer=FileSystemWriter(staging), process_group=group)
        files = _written_files(staging, path, is_writer, group)
        _let_writer(is_writer, complete, path, group)
    except (Exception, CheckpointException) as error:
        if is_writer:
            remove_incomplete(path)
        raise _as_refusal(error, path) from error


def _as_refusal(error: BaseException, path: Path | str) -> SequenceParallelError:
    """Return the error of all ranks; DCP raises on all of them, with each rank's failure."""
    if isinstance(error, SequenceParallelError):
        return error
    return SequenceParallelError(f"checkpoint {path} could not be written: {first_failure(error)}")


def _save_in_store(tensors: dict[str, Any], plain: dict[str, Any], path: str, group: ProcessGroup | None) -> None:
    """Write a folder of this save's own below an address, and last the manifest that names it; then older ones go."""
    is_writer = _is_writer(group)
    save = SAVE + str(comm.gather_objects(uuid.uuid4().hex[:12], group)[0])
    address = Address(path)
    staging = address / save

    def complete() -> None:
        buffer = io.BytesIO()
        torch.save(plain, buffer)
        (staging / META).write_bytes(buffer.getvalue())
        write_manifest_of_save(address, save, {**files, META: checksum(staging / META)})

    _let_writer(is_writer, partial(check_target_at, address, is_folder=True), path, group)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            # An object is in its store when it is closed: there is nothing to flush.
            dcp_save(tensors, storage_writer=FsspecWriter(str(staging), sync_files=False), process_group=group)
        files = _written_files(staging, path, is_writer, group)
        _let_writer(is_writer, complete, path, group)
    except (Exception, CheckpointException) as error:
        if is_writer:
            with suppress(Exception):  # of a store any, and the first one is to be said
                if not (address / MANIFEST).is_file() or save not in (address / MANIFEST).read_text():
                    staging.remove()
        raise _as_refusal(error, path) from error
    _let_writer(is_writer, partial(_remove_other_saves, address, save), path, group)


def _remove_other_saves(address: Address, save: str) -> None:
    for each in [each for each in address.iterdir() if each.name.startswith(SAVE) and each.name != save]:
        each.remove()


def _written_files(
    staging: Location, path: Path | str, is_writer: bool, group: ProcessGroup | None
) -> dict[str, tuple[int, int]]:
    """Return bytes and CRC-32 of all ranks' files."""
    written: dict[str, tuple[int, int]] = {}
    prefix = f"__{dist.get_rank() if dist.is_initialized() else 0}_"
    unreadable = None
    try:
        written = {file.name: checksum(file) for file in staging.iterdir() if file.name.startswith(prefix)}
        if is_writer:
            written[".metadata"] = checksum(staging / ".metadata")
    except Exception as failure:  # of a store any; the others would wait
        unreadable = f"checkpoint {path}: what was written cannot be read: {type(failure).__name__}: {failure}"
    comm.agree(unreadable, group)
    return {name: of for each in comm.gather_objects(written, group) for name, of in each.items()}


def _folder_tensors(checkpoint: dict[str, Any], plain: dict[str, Any], sharded: dict[str, DTensor]) -> dict[str, Any]:
    """Return the tensors of a folder, and put what else is known of them among a checkpoint's plain values."""
    model = {name: each for name, each in checkpoint["state_dict"].items() if isinstance(each, Tensor)}
    tensors: dict[str, Any] = {"state_dict": model, SHARDED: sharded}
    if single := [name for name, value in model.items() if is_single_number(value)]:
        plain[SINGLE_NUMBERS] = single
    if "optimizer_states" in checkpoint:
        plain["optimizer_states"] = [
            _extract_tensors(state, f"optimizer_{index}", tensors)
            for index, state in enumerate(checkpoint["optimizer_states"])
        ]
    return tensors


def _extract_tensors(state: dict[str, Any], key: str, tensors: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state with its sharded tensors replaced by where they are stored; small ones (steps) stay."""
    small: dict[str, Any] = {}
    for name, values in state["state"].items():
        small[name] = {}
        for entry, value in values.items():
            if isinstance(value, DTensor):
                tensors.setdefault(key, {}).setdefault(name, {})[entry] = value
                small[name][entry] = {STORED_AS: f"{key}.{name}.{entry}"}
            else:
                small[name][entry] = value.detach().cpu() if isinstance(value, Tensor) else value
    plain, refused, _ = plain_checkpoint(
        {"class": state["class"], "state": small, "param_groups": state["param_groups"]}
    )
    if refused:
        raise SequenceParallelError(
            f"{key}: {refused[0]}, which would not load again: keep numbers, tensors and containers in optimizer state"
        )
    return plain


def _save_file(
    checkpoint: dict[str, Any],
    plain: dict[str, Any],
    path: Path | str,
    write: Callable[[dict[str, Any], str], None],
    group: ProcessGroup | None,
) -> None:
    is_writer = _is_writer(group)
    if isinstance(path, str):
        _let_writer(is_writer, partial(_check_file_at, path), path, group)
    if isinstance(path, Path) and write is _write_file:
        stored = (checkpoint["state_dict"], [state["state"] for state in checkpoint.get("optimizer_states", ())], plain)
        _let_writer(is_writer, partial(check_free_space, path, stored), path, group)
    plain["state_dict"] = {name: _whole(value, is_writer) for name, value in checkpoint["state_dict"].items()}
    if "optimizer_states" in checkpoint:
        plain["optimizer_states"] = [_numbered(state, is_writer) for state in checkpoint["optimizer_states"]]
    _let_writer(is_writer, lambda: write(plain, str(path)), path, group)


def _check_file_at(path: str) -> None:
    """Refuse one file where a folder of that name is; a plugin of the user's may know addresses that are none here."""
    if (folder := folder_at(path)) is not None:
        check_target_at(folder, is_folder=False)


def _write_file(plain: dict[str, Any], name: str) -> None:
    path = Path(name)
    temporary = partial_path(path)
    check_target(path)
    begin_file(temporary)
    try:
        with temporary.open("wb") as stream:
            torch.save(plain, stream)
            stream.flush()
            os.fsync(stream.fileno())
        put_in_place(temporary, path)
    finally:
        end_writing(temporary)


def _whole(value: Any, is_writer: bool) -> Any:
    """Gather a sharded tensor on all ranks; those that do not write let it go at once."""
    whole = in_own_shape(value.full_tensor(), value) if isinstance(value, DTensor) else value
    if not isinstance(whole, Tensor):
        return whole
    return whole.detach().cpu().clone() if is_writer else None


def _numbered(state: dict[str, Any], is_writer: bool) -> dict[str, Any]:
    """Return an optimizer's state as torch's own state_dict has it: whole tensors, parameters by number."""
    names = [name for group in state["param_groups"] for name in group["params"]]
    numbers = {name: number for number, name in enumerate(names)}
    return {
        "state": {
            numbers[name]: {entry: _whole(value, is_writer) for entry, value in values.items()}
            for name, values in sorted(state["state"].items(), key=lambda item: numbers[item[0]])
        },
        "param_groups": [
            {**group, "params": [numbers[name] for name in group["params"]]} for group in state["param_groups"]
        ],
    }


def _let_writer(is_writer: bool, act: Callable[[], None], path: Path | str, group: ProcessGroup | None) -> None:
    """Let rank 0 act; its failure is every rank's."""
    error = None
    if is_writer:
        try:
            act()
        except SequenceParallelError as refusal:
            error = str(refusal)
        except Exception as failure:  # of a user's plugin any; the others would wait
            is_of_place = isinstance(failure, OSError) and failure.errno in _OF_PLACE
            elsewhere = _ELSEWHERE if is_of_place else ""
            error = f"checkpoint {path} could not be written: {type(failure).__name__}: {failure}{elsewhere}"
    comm.agree(error, group)


def _is_writer(group: ProcessGroup | None) -> bool:
    if group is not None:
        return comm.rank_in(group) == 0
    return not dist.is_initialized() or dist.get_rank() == 0
