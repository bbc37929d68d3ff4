"""A batch as its loader gave it, for the preflight's reference: `model(**batch)` sees nothing of what a sharded batch holds besides."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import Any

import torch
from torch import Tensor

from lightning_sp.batch_structure import is_plain_dict


def untouched_batch(batch: Any, held: Any, device: torch.device) -> Any:
    """Return a batch whose entries are the loader's, which gives those that sharding adds to whoever asks for one by its name.

    One device has no such entry. A step that reads one is written for a sharded batch, and means the whole sequence's.

    Args:
        batch: as the loader gave it.
        held: the same as sharding it over one rank makes it.
        device: of the step.
    """
    if not isinstance(batch, Mapping):
        return batch
    added = {name: value for name, value in held.items() if name not in batch}

    def missing(_: Any, name: str) -> Any:
        value = added[name]
        return value.to(device) if isinstance(value, Tensor) else value

    # Lightning moves a batch to the device by making another one of its type: what is added must belong to the type.
    if is_plain_dict(batch):
        return type("UntouchedBatch", (dict,), {"__missing__": missing})(batch)
    kind = type(batch)

    def get(self: Any, name: Any) -> Any:
        try:
            return kind.__getitem__(self, name)
        except KeyError:
            if name in added:
                return missing(self, name)
            raise

    made = copy(batch)
    made.__class__ = type(kind.__name__, (kind,), {"__getitem__": get})
    return made
