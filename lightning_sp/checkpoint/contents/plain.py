"""A checkpoint's values as plain containers, so that `torch.load(weights_only=True)`, Lightning's choice on resume, reads them back."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_sp.checkpoint.contents.containers import (
    CONTAINERS,
    HYPER_PARAMETERS,
    TYPES,
    described_containers,
    key_of,
    plain_container,
)

# The entry of a checkpoint that says which of its hyperparameters became text.
AS_TEXT = "lightning_sp_as_text"
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


# In place of a sharded tensor that is stored elsewhere: the name that it has there.
STORED_AS = "stored_as"
# What those names begin with where all tensors of a checkpoint are: of callbacks and hooks, not of the model or its optimizers.
SHARDED = "sharded"
# The entry of a folder with what of the model's state is no tensor: what `get_extra_state` returns.
OBJECTS = "state_dict_objects"


def plain_checkpoint(
    checkpoint: Mapping[str, Any], sharded: dict[str, DTensor] | None = None
) -> tuple[dict[str, Any], list[str], list[str]]:
    """Return the checkpoint in plain containers, what was refused and which hyperparameters became text.

    Hyperparameters of any type are for people to read: what is not plain there becomes its repr. Elsewhere a value that would not load
    again is refused. All ranks must call this together, with the same entries.

    Args:
        checkpoint: its entries but for the model and the optimizers.
        sharded: takes the sharded tensors, by names, which stand in their places as ``{STORED_AS: name}``; None gathers them.

    Communicates: an all_gather for each sharded tensor that is gathered.
    """
    refused: list[str] = []
    described: list[str] = []
    plain = {}
    for key, value in checkpoint.items():
        if key in TYPES.values():  # the class of what is a dict now
            continue
        plain[str(key)] = _plain(value, str(key), described if key in HYPER_PARAMETERS else refused, sharded)
    if containers := described_containers(checkpoint):
        plain[CONTAINERS] = containers
    if described:
        plain[AS_TEXT] = described
    return plain, refused, described


def is_stored_elsewhere(value: Any) -> bool:
    """Return whether an entry names where its tensor is stored."""
    return isinstance(value, Mapping) and set(value) == {STORED_AS} and isinstance(value[STORED_AS], str)


def _plain(value: Any, where: str, strange: list[str], sharded: dict[str, DTensor] | None) -> Any:
    if isinstance(value, DTensor):
        if sharded is not None and any(each.is_shard() for each in value.placements):
            sharded[where] = value
            return {STORED_AS: f"{SHARDED}.{where}"}
        return value.full_tensor().detach().cpu()
    if isinstance(value, Tensor):
        # A clone: torch.save writes the whole storage of a view.
        return value.detach().cpu().clone()
    if type(value) in _PLAIN:
        return value
    value = plain_container(value)
    is_class = isinstance(value, type)
    if isinstance(value, Mapping) or (not is_class and hasattr(value, "items") and hasattr(value, "keys")):
        return {key_of(k): _plain(v, f"{where}[{k!r}]", strange, sharded) for k, v in value.items()}
    if isinstance(value, (set, frozenset)):
        return {_plain(v, where, strange, None) for v in value}  # a name in a tensor's place would be a dict
    if isinstance(value, tuple):
        return tuple(_plain(v, f"{where}[{i}]", strange, sharded) for i, v in enumerate(value))
    if isinstance(value, list):
        return [_plain(v, f"{where}[{i}]", strange, sharded) for i, v in enumerate(value)]
    if isinstance(value, Path):
        return str(value)
    # An Enum of strings or numpy's float64 is a str or float by class, and does not load as what it is.
    for base in (int, float, str):
        if isinstance(value, base):
            return getattr(value, "value", value) if isinstance(value, Enum) else base(value)
    if callable(getattr(value, "item", None)) and getattr(value, "ndim", None) == 0:
        return value.item()  # numpy's scalars
    strange.append(f"{where} is {type(value).__module__}.{type(value).__qualname__}")
    return repr(value)
