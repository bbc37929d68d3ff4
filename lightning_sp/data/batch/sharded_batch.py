"""The mark of a batch that holds one rank's part of its sequences."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_sp.batch_structure import entries_of, is_plain_dict, with_entries


class ShardedBatch(dict[str, Any]):
    """A batch that holds this rank's part of its sequences. The type is the mark: it is never sharded twice."""


def is_sharded(batch: Any) -> bool:
    """Return whether a batch already holds one rank's part of its sequences."""
    if isinstance(batch, ShardedBatch):
        return True
    if is_plain_dict(batch) or isinstance(batch, Tensor):
        return False
    return any(getattr(each, "_lightning_sp_sharded", False) for each in (entries_of(batch) or {}).values())


def rebuild(batch: Any, local: dict[str, Any]) -> Any:
    """Put the sharded entries in a structure of the batch's own classes, and mark it."""
    made = with_entries(batch, local)
    if is_plain_dict(batch):
        return ShardedBatch(made)
    # An entry without the sequence is in both: a mark on it would say that the whole batch is sharded.
    given = {id(value) for value in (entries_of(batch) or {}).values()}
    for value in local.values():
        if isinstance(value, Tensor) and id(value) not in given:
            value._lightning_sp_sharded = True  # type: ignore[attr-defined]
    return made
