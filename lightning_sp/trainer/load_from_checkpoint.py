"""`Module.load_from_checkpoint` of a checkpoint folder: Lightning's reader opens a file, and here finds a folder of ours.

The name that Lightning's `core/saving.py` calls is bound to the function below when the package is imported. All else goes to the original.
"""

from __future__ import annotations

from functools import wraps
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.core import saving
from torch import Tensor

from lightning_sp.checkpoint import is_checkpoint_folder, read_checkpoint_folder


def read_checkpoint_folders() -> None:
    """Let `load_from_checkpoint` read checkpoint folders; harmless when repeated."""
    original: Any = vars(saving)["pl_load"]
    if hasattr(original, "__wrapped__"):
        return

    @wraps(original)
    def read(path: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        if isinstance(path, (str, Path)) and is_checkpoint_folder(path):
            return _moved(read_checkpoint_folder(path), map_location)
        return original(path, map_location=map_location, weights_only=weights_only)

    vars(saving)["pl_load"] = read


def _moved(checkpoint: dict[str, Any], map_location: Any) -> dict[str, Any]:
    """Return a checkpoint with its model on a device; Lightning's default, a function of storages, keeps it on the CPU."""
    if not isinstance(map_location, (str, torch.device)):
        return checkpoint
    state: dict[str, Tensor] = checkpoint["state_dict"]
    return {**checkpoint, "state_dict": {name: value.to(map_location) for name, value in state.items()}}
