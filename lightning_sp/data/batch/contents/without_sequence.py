"""Batches without a sequence, images and their classes say: every rank of a sequence runs such a step whole.

pixel_values (B, 3, H, W), labels (B,)         whole: there are pictures, and nothing that may be tokens
pixel_values, labels (B, H, W)                 whole: a number for each pixel
pixel_values, labels [{boxes (n, 4)}, ...]     whole: a list for what each picture shows, of which there are different numbers
x (B, S) of integers, x (B, S, E)              may be tokens of a name that is not known: never run whole unasked
x (B, F)                                       features or a series, which nothing tells: likewise
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_sp.batch_structure import holds_tensors
from lightning_sp.context.sequence import SequenceInfo
from lightning_sp.data.batch.contents.entries import (
    OF_TARGETS,
    STANDARD_NAMES,
    TARGET_WEIGHTS,
    named_dims,
    plain_entries,
    shapes_of,
)
from lightning_sp.data.batch.contents.media import is_of_media
from lightning_sp.data.batch.shard_options import ShardOptions

# What a step may be told of rows without being told of tokens.
_OF_ROWS = {*OF_TARGETS, *TARGET_WEIGHTS}
# Hugging Face's name of samples and spectrograms, beside those of `media`.
_SOUNDS = "input_values"


def holds_no_sequence(batch: Any, options: ShardOptions) -> bool:
    """Return whether a batch is to run whole: it holds pictures or sounds and nothing that may be tokens, or the user says so.

    Args:
        batch: whole.
        options: what is declared of its entries.
    """
    if options.sequence_dims:
        return False
    if isinstance(batch, Tensor):
        return batch.is_floating_point() and batch.dim() > 3
    entries = plain_entries(batch)
    if not options.none_declared and any(map(_is_nested, _values(batch))):
        return False
    known = {part for n, v in entries.items() if isinstance(v, Tensor) for part in n.split(".")} & STANDARD_NAMES.keys()
    if known - _OF_ROWS:
        return False
    if options.none_declared:
        return True
    entries = {n: v for n, v in entries.items() if not _is_in_list(n)}
    pictures = [n for n, v in entries.items() if _is_picture(n, v)]
    planes = {tuple(entries[n].shape[-2:]) for n in pictures if entries[n].dim() > 3}
    return bool(pictures) and not any(_may_be_tokens(n, v, planes) for n, v in entries.items() if n not in pictures)


def holds_rows_alone(entries: Mapping[str, Any], options: ShardOptions) -> bool:
    """Return whether no entry is known to carry a sequence, or those of such a name have none, ids (B,) say: a number for each row."""
    return all(entries[name].dim() <= dim for name, dim in named_dims(entries, options).items())


def without_sequence(batch: Any) -> SequenceInfo:
    """Return what a batch holds whose rows are of no sequence: each of them counts as one token."""
    values = [batch] if isinstance(batch, Tensor) else plain_entries(batch).values()
    sizes = [int(value.shape[0]) for value in values if isinstance(value, Tensor) and value.dim() > 0]
    return SequenceInfo(
        rows=sizes[0] if sizes else 1,
        length=1,
        padded_length=1,
        boundaries=None,
        position_ids=None,
        shift_labels=None,
        is_whole=True,
    )


def describe_whole(batch: Any, num_ranks: int) -> str:
    """Return, for a warning, that a batch is not split, and what that costs."""
    held = tuple(batch.shape) if isinstance(batch, Tensor) else shapes_of(plain_entries(batch))
    return (
        f"the batch holds no sequence ({held}), so nothing of it is split: each of the {num_ranks} ranks of a sequence does the whole of its "
        "group's work, and the preflight has nothing to compare; sequence_parallel_size=1 would use them for more rows. If an entry is a "
        "sequence, say sequence_dims={'name': dim}"
    )


def _is_picture(name: str, value: Any) -> bool:
    """Return whether an entry is of pictures, videos or sounds: by its name, or by its dims."""
    if not isinstance(value, Tensor) or name in STANDARD_NAMES:
        return False
    return value.dim() > 3 or (value.dim() > 0 and (is_of_media(name, value) or name.startswith(_SOUNDS)))


def _values(batch: Any) -> Collection[Any]:
    return batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (tuple, list)) else ()


def _is_nested(value: Any) -> bool:
    """Return whether an entry is a batch of its own: what is in it may be tokens."""
    return isinstance(value, Mapping) and holds_tensors(value)


def _is_in_list(name: str) -> bool:
    """Return whether an entry is one of a list's within the batch, `labels.0.boxes`."""
    return any(part.isdigit() for part in name.split(".")[1:])


def _may_be_tokens(name: str, value: Any, planes: Set[tuple[int, ...]]) -> bool:
    """Return whether an entry beside pictures may be a sequence of tokens.

    Args:
        name: of it.
        value: of it.
        planes: the heights and widths of the pictures: a number for each of their pixels is no token.
    """
    if isinstance(value, (Mapping, list, tuple)):
        return not isinstance(value, Mapping) and any(_is_list(each) for each in value)
    if isinstance(value, np.ndarray):
        return value.ndim > 1
    if not isinstance(value, Tensor) or value.dim() < 2 or value.shape[1] == 1:
        return False
    if value.dim() == 2:
        return not value.is_floating_point() and value.dtype != torch.bool
    return value.dim() == 3 and tuple(value.shape[1:]) not in planes


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple, np.ndarray, Mapping))
