"""Loading: all checks first, on all ranks together, then each rank reads its part of whatever degrees wrote it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import empty as empty_dtensor

from lightning_sp import comm
from lightning_sp.checkpoint.contents.check import STATE_PREFIX, check_model, check_optimizers, stored_shapes
from lightning_sp.checkpoint.contents.containers import restore_containers
from lightning_sp.checkpoint.contents.frozen import excluded_shapes, include_frozen
from lightning_sp.checkpoint.contents.plain import OBJECTS, STORED_AS, is_stored_elsewhere
from lightning_sp.checkpoint.contents.state import model_state
from lightning_sp.checkpoint.contents.stored_elsewhere import memory_of, with_memory
from lightning_sp.checkpoint.folders.address import Location
from lightning_sp.checkpoint.folders.folder import (
    Contents,
    damage,
    first_failure,
    folder_at,
    is_folder_checkpoint,
    local_path,
)
from lightning_sp.checkpoint.folders.metadata import checked_reader
from lightning_sp.checkpoint.folders.read import read_by, read_file, read_folder
from lightning_sp.checkpoint.folders.replace import recover
from lightning_sp.checkpoint.folders.same_content import check_same_content
from lightning_sp.errors import SequenceParallelError
from lightning_sp.mesh import tensor_parallel_part
from lightning_sp.parameter_names import by_user_name, user_name
from lightning_sp.weights.single_numbers import SINGLE_NUMBERS, is_single_number


def load_checkpoint(
    path: Path | str,
    module: nn.Module,
    *,
    with_optimizers: bool,
    strict: bool = True,
    adapted: bool = False,
    weights_only: bool | None = None,
    read: Callable[..., dict[str, Any]] | None = None,
    group: ProcessGroup | None = None,
) -> dict[str, Any]:
    """Read a checkpoint for a model on any degrees; every rank calls it. Nothing of the model is changed yet.

    Args:
        path: a folder or file that `save_checkpoint` wrote, or a file of plain Lightning; equal on all ranks. An address is for `read`.
        module: the resharded module: its tensors say which part this rank reads.
        with_optimizers: their state is read, too; else the model alone (evaluation).
        strict: refuse names that are only in the checkpoint or only in the model.
        adapted: code of the user's changes the model's state before it is loaded: all of it is read, and nothing of it refused.
        weights_only: given to `torch.load` of a file, which takes None for True, unless its environment says otherwise; of a folder plain
            values alone are loaded.
        read: of the user's, on every rank, for what is no folder of ours.
        group: the world, on a backend for host objects.

    Communicates: DCP's plan; agreement on errors.

    Returns:
        Lightning's checkpoint: sharded tensors in ``state_dict`` and ``optimizer_states``; whole ones when read from a file.

    Raises:
        SequenceParallelError: missing, half-written, damaged, of another model or base, or of other optimizers; not one on all hosts.
    """
    error, checkpoint, metadata, contents = None, {}, None, None
    _recover(path, group)
    try:
        folder = _folder(path, read)
        if folder is None:
            checkpoint = _read_whole(path, read, weights_only)
            shapes = _shapes(checkpoint["state_dict"])
        else:
            checkpoint, metadata, contents = read_folder(folder)
            shapes = stored_shapes(metadata)
        if not adapted:
            check_model(path, {**shapes, **excluded_shapes(checkpoint)}, _shapes(model_state(module)), strict=strict)
        if with_optimizers:
            check_optimizers(path, checkpoint)
    except SequenceParallelError as refusal:
        error = str(refusal)
    except Exception as failure:  # of a store any, on this rank alone
        error = f"checkpoint {path} cannot be read: {type(failure).__name__}: {failure}"
    comm.agree(error, group)
    check_same_content(path, contents, group)
    if metadata is not None and contents is not None:
        checkpoint = _read_tensors(
            contents, checkpoint, metadata, module, with_optimizers=with_optimizers, all_of_model=adapted, group=group
        )
    include_frozen(path, checkpoint, module, group)
    restore_containers(checkpoint)
    return checkpoint


def check_adapted(path: Path | str, checkpoint: Mapping[str, Any], module: nn.Module, *, strict: bool) -> None:
    """Refuse a state that the user's code has left as no state of the resharded module. Equal on all ranks.

    Raises:
        SequenceParallelError: with counts and the first names.
    """
    state = by_user_name(checkpoint["state_dict"])
    check_model(path, _shapes(state), _shapes(model_state(module)), strict=strict)


def _shapes(state: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    tensors = {name: each for name, each in state.items() if isinstance(each, Tensor)}
    return {name: () if is_single_number(each) else tuple(each.shape) for name, each in tensors.items()}


def _folder(path: Path | str, read: Callable[..., Any] | None) -> Location | None:
    """Return the folder that a checkpoint is, None where it is one file or a plugin's."""
    if isinstance(path, str):
        return folder_at(path)
    return None if path.is_file() or (read is not None and not is_folder_checkpoint(path)) else path


def _read_whole(path: Path | str, read: Callable[..., Any] | None, weights_only: bool | None) -> dict[str, Any]:
    """Return the checkpoint in a file, or what a plugin reads, its model by the user's names."""
    found = read_by(read, path, weights_only) if read is not None else read_file(local_path(path), weights_only)
    return {**found, "state_dict": by_user_name(found["state_dict"])}


def _recover(path: Path | str, group: ProcessGroup | None) -> None:
    """Let rank 0 give the checkpoint the name that a save was stopped in replacing, but in a store, which has no such."""
    if isinstance(path, str):
        return
    found = None
    if comm.rank_in(group or comm.world()) == 0:
        # Where it cannot, reading says on all ranks what is missing.
        with suppress(OSError):
            found = recover(path)
    if said := comm.gather_objects(found, group)[0]:
        rank_zero_warn(said)


def _check_files(contents: Contents, group: ProcessGroup | None) -> None:
    """Verify the tensors' files, each by one rank."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    comm.agree(damage(contents, sorted(contents.files)[rank::size]), group)


def _read_tensors(
    contents: Contents,
    checkpoint: dict[str, Any],
    metadata: Metadata,
    module: nn.Module,
    *,
    with_optimizers: bool,
    all_of_model: bool,
    group: ProcessGroup | None,
) -> dict[str, Any]:
    _check_files(contents, group)
    stored = metadata.state_dict_metadata
    # What is sharded in other entries has any shape: split as what tensor parallelism leaves whole.
    shards = (each for each in module.parameters() if isinstance(each, DTensor))
    like = next((each for each in shards if tensor_parallel_part(each)[1] is None), None)
    own = model_state(module)
    state = {
        name: _empty_like(own[name], stored[STATE_PREFIX + name])
        if name in own
        else memory_of(stored[STATE_PREFIX + name], like)
        for name in stored_shapes(metadata)
        if name in own or all_of_model
    }
    wanted = {STATE_PREFIX + name: value for name, value in state.items()}
    if with_optimizers:
        parameters = {user_name(name): parameter for name, parameter in module.named_parameters()}
        for optimizer_values in checkpoint["optimizer_states"]:
            for name, values in optimizer_values["state"].items():
                for entry, value in values.items():
                    if is_stored_elsewhere(value) and name in parameters:
                        key = value[STORED_AS]
                        values[entry] = wanted[key] = _empty_like(parameters[name], stored[key])
    rest = {name: value for name, value in checkpoint.items() if name != "optimizer_states"}
    checkpoint.update(with_memory(rest, stored, like, wanted))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        try:
            dcp_load(wanted, storage_reader=checked_reader(contents.folder, metadata), process_group=group)
        except (Exception, CheckpointException) as error:  # DCP raises on all ranks, with each rank's failure
            raise SequenceParallelError(
                f"checkpoint {contents.folder} could not be read: {first_failure(error)}"
            ) from error
    checkpoint["state_dict"] = {**state, **checkpoint.pop(OBJECTS, {})}
    checkpoint.pop(SINGLE_NUMBERS, None)
    return checkpoint


def _empty_like(target: Tensor, stored: Any) -> Tensor:
    """Return memory for a stored tensor: split as `target` where the shapes agree, on every rank whole otherwise."""
    size, dtype = tuple(stored.size), stored.properties.dtype
    if size == tuple(target.shape):
        return torch.empty_like(target, dtype=dtype, requires_grad=False)
    if isinstance(target, DTensor):
        placements = [Replicate()] * target.device_mesh.ndim
        return empty_dtensor(*size, dtype=dtype, device_mesh=target.device_mesh, placements=placements)
    return torch.empty(size, dtype=dtype, device=target.device)
