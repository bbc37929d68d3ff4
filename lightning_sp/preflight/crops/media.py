"""Images, videos and sounds of a crop: it must hold all their placeholders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_sp.data.batch.contents.media import is_of_media
from lightning_sp.data.batch.shard_options import ShardOptions


def has_rows_of_its_own(entries: Mapping[str, Any], rows: int) -> bool:
    """Return whether images, say, stand one after the other, more or fewer than the batch's rows: then no row can be left out."""
    return any(is_of_media(name, value) and value.shape[0] != rows for name, value in entries.items())


def placeholders(entries: Mapping[str, Any], options: ShardOptions) -> tuple[int, int] | None:
    """Return [start, stop) of the tokens of all rows in whose place a model puts tokens of images; None where there are none."""
    ids = entries.get("input_ids")
    if not isinstance(ids, Tensor) or not any(is_of_media(name, value) for name, value in entries.items()):
        return None
    places = torch.isin(ids, torch.tensor(options.placeholders, dtype=ids.dtype, device=ids.device)).any(0).nonzero()
    return (int(places.min()), int(places.max()) + 1) if len(places) else None
