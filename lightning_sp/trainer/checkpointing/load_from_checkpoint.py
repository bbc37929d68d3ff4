"""`Module.load_from_checkpoint` of what this package writes: checkpoint folders, and checkpoints that leave frozen parameters out.

Lightning's reader opens a file, and here finds a folder of ours. What was left out is put in from the module that Lightning has built. The
names that Lightning's `core/saving.py` calls are bound to the functions below when the package is imported. All else goes to the originals.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.core import saving
from torch import Tensor, nn

from lightning_sp.checkpoint import (
    AS_TEXT,
    EXCLUDED,
    include_frozen_of_whole,
    is_checkpoint_folder,
    read_checkpoint_folder,
    restore_containers,
)
from lightning_sp.errors import SequenceParallelError


def read_checkpoint_folders() -> None:
    """Let `load_from_checkpoint` read checkpoint folders, and what leaves frozen parameters out; harmless when repeated."""
    original: Any = vars(saving)["pl_load"]
    if hasattr(original, "__wrapped__"):
        return
    load: Any = vars(saving)["_load_state"]

    @wraps(original)
    def read(path: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        if isinstance(path, (str, Path)) and is_checkpoint_folder(path):
            checkpoint = _moved(read_checkpoint_folder(path), map_location)
        else:
            checkpoint = original(path, map_location=map_location, weights_only=weights_only)
        if isinstance(checkpoint, dict):
            restore_containers(checkpoint)
        return checkpoint

    @wraps(load)
    def load_state(cls: Any, checkpoint: dict[str, Any], **options: Any) -> Any:
        _check_text(cls, checkpoint, options)
        if not (issubclass(cls, nn.Module) and checkpoint.get(EXCLUDED)):
            return load(cls, checkpoint, **options)
        with _whole_states(cls, checkpoint):
            return load(cls, checkpoint, **options)

    vars(saving).update({"pl_load": read, "_load_state": load_state})


def _check_text(cls: Any, checkpoint: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Refuse to build a class of hyperparameters that are in its checkpoint as text alone.

    Raises:
        SequenceParallelError: with the first of them that is not given.
    """
    key, parameters = f"{cls.CHECKPOINT_HYPER_PARAMS_KEY}[", inspect.signature(cls.__init__).parameters
    takes_all = any(each.kind == each.VAR_KEYWORD for each in parameters.values())
    as_one = checkpoint.get(cls.CHECKPOINT_HYPER_PARAMS_NAME)
    for described in checkpoint.get(AS_TEXT, ()):
        if not described.startswith(key):
            continue
        name = as_one if as_one in parameters else described[len(key) :].partition("]")[0].strip("'\"")
        if name not in given and (takes_all or name in parameters):
            raise SequenceParallelError(
                f"{described}, which the checkpoint holds as text, and {cls.__name__} would be built of that: give it, "
                f"{cls.__name__}.load_from_checkpoint(..., {name}=...); or leave it out, self.save_hyperparameters(ignore=[{name!r}])"
            )


@contextmanager
def _whole_states(cls: type[nn.Module], checkpoint: dict[str, Any]) -> Iterator[None]:
    """Let a class' `load_state_dict` complete the state of a checkpoint while this is entered.

    Lightning builds the module and loads it in one function, so between the two there is this call alone.

    Raises:
        SequenceParallelError: the module's frozen parameters are not those that were left out.
    """
    before, had_own, completed = cls.load_state_dict, "load_state_dict" in vars(cls), []

    def load_state_dict(module: nn.Module, state: Any, *args: Any, **options: Any) -> Any:
        if state is checkpoint["state_dict"]:
            include_frozen_of_whole(checkpoint, module, f"of {cls.__name__}")
            state = checkpoint["state_dict"]
            completed.append(module)
        return before(module, state, *args, **options)

    cls.load_state_dict = load_state_dict  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        if had_own:
            cls.load_state_dict = before  # type: ignore[method-assign]
        else:
            del cls.load_state_dict
    if not completed:
        raise SequenceParallelError(
            f"{cls.__name__}.load_from_checkpoint: the checkpoint leaves frozen parameters out, and the module has loaded another state than "
            "the checkpoint's, so whether it holds them is not known: let load_state_dict give what it is given to super().load_state_dict"
        )


def _moved(checkpoint: dict[str, Any], map_location: Any) -> dict[str, Any]:
    """Return a checkpoint with its model on a device; Lightning's default, a function of storages, keeps it on the CPU."""
    if not isinstance(map_location, (str, torch.device)):
        return checkpoint
    state: dict[str, Tensor] = checkpoint["state_dict"]
    return {**checkpoint, "state_dict": {name: value.to(map_location) for name, value in state.items()}}
