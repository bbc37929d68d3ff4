"""Memory for the sharded tensors that stand in a checkpoint's plain values by the name under which they are stored: `plain.STORED_AS`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import empty as empty_dtensor

from lightning_sp.checkpoint.contents.plain import STORED_AS, is_stored_elsewhere


def with_memory(value: Any, stored: Mapping[str, Any], like: DTensor | None, wanted: dict[str, Any]) -> Any:
    """Return a checkpoint's entries with memory for the sharded tensors in them.

    Args:
        value: the entries.
        stored: DCP's description of each stored tensor, by name.
        like: a shard of the model, by which they are split; None for whole ones.
        wanted: what is to be read, by name: they are added to it.
    """
    if is_stored_elsewhere(value) and (of := stored.get(value[STORED_AS])) is not None:
        wanted[value[STORED_AS]] = empty = memory_of(of, like)
        return empty
    if isinstance(value, Mapping):
        return {key: with_memory(each, stored, like, wanted) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(with_memory(each, stored, like, wanted) for each in value)
    return value


def memory_of(stored: Any, like: DTensor | None) -> Tensor:
    """Return memory for a stored tensor of any shape, split as `like` where it has such a dimension, on every rank whole otherwise."""
    size, dtype = tuple(stored.size), stored.properties.dtype
    if like is None or any(each.is_shard() and each.dim >= len(size) for each in like.placements):  # type: ignore[attr-defined]
        return torch.empty(size, dtype=dtype)
    return empty_dtensor(*size, dtype=dtype, device_mesh=like.device_mesh, placements=like.placements)
