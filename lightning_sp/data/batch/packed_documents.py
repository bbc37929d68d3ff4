"""Packed documents of a batch: their boundaries, read from position_ids."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_sp.attention.spec.documents import boundaries_from_positions
from lightning_sp.data.batch.shard_options import ShardOptions
from lightning_sp.errors import SequenceParallelError


def read_position_ids(given: Any, rows: int, length: int) -> tuple[Tensor, bool]:
    """Return the positions of every row, (rows, length), and whether the batch gave them; 0, 1, 2, ... where it did not."""
    if given is None:
        return torch.arange(length).expand(rows, length), False
    if not isinstance(given, Tensor):
        raise SequenceParallelError(
            f"position_ids that are no tensor, but of type {type(given).__name__}: must be (batch, tokens), ({rows}, {length}) here; make them "
            "one in the dataset or its collate_fn, torch.as_tensor(positions), or leave them out where they count 0, 1, 2, ..."
        )
    if given.dim() != 2:
        raise SequenceParallelError(
            f"position_ids of shape {tuple(given.shape)}: must be (batch, tokens), ({rows}, {length}) here; reshape them in the dataset or its "
            "collate_fn, or leave them out where they count 0, 1, 2, ..."
        )
    return given.expand(rows, length), True


def document_boundaries(position_ids: Tensor, options: ShardOptions, mask_given: bool) -> Tensor | None:
    """Return the boundaries of packed documents, where positions that do not rise by one are known to mean them."""
    boundaries = boundaries_from_positions(position_ids)
    packed = options.packed_documents
    if packed is None and options.model_shifts_labels and not mask_given:
        packed = True  # Hugging Face's convention; given a mask, its models go by that alone
    if boundaries is None or packed:
        return boundaries
    if packed is None:
        row = int((boundaries[:, 1] < boundaries[:, -1]).nonzero()[0])
        at = int(boundaries[row, 1])
        raise SequenceParallelError(
            f"position_ids do not rise by one: row {row} goes from {int(position_ids[row, at - 1])} to {int(position_ids[row, at])} at token "
            f"{at}, and nothing says whether that begins another document: pass packed_documents=True to keep attention within documents, or "
            "packed_documents=False to attend to the whole row whatever its positions are, as scaled_dot_product_attention does on one device"
        )
    return None


def pad_boundaries(boundaries: Tensor | None, padded: int) -> Tensor | None:
    """Make the padding a document of its own, so that it takes no part in attention."""
    if boundaries is None:
        return None
    return torch.cat([boundaries, torch.full((boundaries.shape[0], 1), padded)], 1)
