"""Images, videos and sounds of a batch, known by name: which rows they belong to is not known, and a batch may have none."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lightning_sp.batch_structure import entries_of

# How Hugging Face's processors name what is made of them.
_NAMES = (
    "pixel_",
    "image_",
    "images",
    "video_",
    "videos",
    "audio_",
    "input_features",
    "input_values",
    "feature_",
    "second_per_grid",
)


def is_of_media(name: str, value: Any) -> bool:
    """Return whether an entry of a batch is made of images, videos or sounds, whose rows need not be the batch's."""
    return isinstance(value, Tensor) and value.dim() > 0 and name.startswith(_NAMES)


def entries_digest(batch: Any) -> int:
    """Return a number that tells which entries a batch holds: None and what is empty count as absent."""
    entries = {} if isinstance(batch, (tuple, list)) else entries_of(batch) or {}
    names = sorted(n for n, v in entries.items() if _is_there(v))
    return int.from_bytes(hashlib.blake2b(",".join(names).encode(), digest_size=7).digest(), "big")


def _is_there(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() > 0
    return value is not None and not (isinstance(value, (list, tuple, Mapping)) and len(value) == 0)
