"""Refusing a checkpoint of another model, or of other optimizers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from lightning_sp.errors import SequenceParallelError

STATE_PREFIX = "state_dict."


def stored_shapes(metadata: Metadata) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the model's tensors in a checkpoint folder."""
    return {
        key[len(STATE_PREFIX) :]: tuple(value.size)
        for key, value in metadata.state_dict_metadata.items()
        if key.startswith(STATE_PREFIX) and isinstance(value, TensorStorageMetadata)
    }


def check_model(path: Path, stored: Mapping[str, Any], own: Mapping[str, Any], *, strict: bool) -> None:
    """Refuse a checkpoint of another model, with counts and the first names."""
    differing = [f"{n} is {stored[n]} there and {own[n]} here" for n in own if n in stored and stored[n] != own[n]]
    only_own = [name for name in own if name not in stored]
    only_stored = [name for name in stored if name not in own]
    parts = []
    if differing:
        parts.append(f"{len(differing)} of {len(own)} tensors differ in shape ({_first(differing, '; ')})")
    if strict and only_own:
        parts.append(f"{len(only_own)} are only in this model ({_first(only_own)})")
    if strict and only_stored:
        parts.append(f"{len(only_stored)} are only in the checkpoint ({_first(only_stored)})")
    if parts:
        fix = "" if differing else ", or set strict_loading=False on the LightningModule"
        raise SequenceParallelError(
            f"checkpoint {path} is of another model: {'; '.join(parts)}; build the model with the options it was trained with{fix}"
        )


def _first(names: list[str], separator: str = ", ") -> str:
    return separator.join(names[:3]) + (f"{separator}..." if len(names) > 3 else "")


def check_optimizers(path: Path, checkpoint: Mapping[str, Any], count: int) -> None:
    """Refuse a checkpoint without optimizers' state, or of another number of them."""
    if "optimizer_states" not in checkpoint:
        raise SequenceParallelError(
            f"checkpoint {path} holds weights alone (save_weights_only=True), and fit(ckpt_path=...) needs the optimizers' state: give another "
            "checkpoint, or export it and load the weights into the model"
        )
    stored = len(checkpoint["optimizer_states"])
    if stored != count:
        raise SequenceParallelError(
            f"checkpoint {path} holds the state of {stored} optimizers, configure_optimizers returned {count} in this run: return the same"
        )
