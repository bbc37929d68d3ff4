"""The mark of a batch that holds one rank's part of its sequences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


class ShardedBatch(dict[str, Any]):
    """A batch that holds this rank's part of its sequences. The type is the mark: it is never sharded twice."""


class FillerBatch(dict[str, Any]):
    """A batch of fillers alone. The type is the mark: none of its rows counts."""


class ShardedFillerBatch(FillerBatch, ShardedBatch):
    """Both."""


def is_sharded(batch: Any) -> bool:
    """Return whether a batch already holds one rank's part of its sequences."""
    return isinstance(batch, ShardedBatch) or (
        isinstance(batch, (tuple, list)) and any(getattr(t, "_lightning_sp_sharded", False) for t in batch)
    )


def rebuild(batch: Any, local: dict[str, Any]) -> Any:
    """Put the sharded entries in a container of the batch's own type, and mark it."""
    if isinstance(batch, Mapping):
        return ShardedBatch(local)
    # An entry without the sequence is in both: a mark on it would say that the whole batch is sharded.
    given = {id(value) for value in ([batch] if isinstance(batch, Tensor) else batch)}
    for value in local.values():
        if isinstance(value, Tensor) and id(value) not in given:
            value._lightning_sp_sharded = True  # type: ignore[attr-defined]
    if isinstance(batch, Tensor):
        return local["input_ids"]
    values = list(local.values())
    return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
