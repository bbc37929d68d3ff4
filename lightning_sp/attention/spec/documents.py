"""Packed documents: their boundaries from lengths or positions (what `cu_seqlens` says elsewhere), and each token's document."""

from __future__ import annotations

import torch
from torch import Tensor


def boundaries_from_lengths(lengths: list[list[int]]) -> Tensor:
    """Return boundaries from the document lengths of each row.

    Shapes: rows x documents -> (rows, most documents + 1), int64.
    """
    total = sum(lengths[0])
    width = max(len(row) for row in lengths) + 1
    rows = []
    for row in lengths:
        edges = [0]
        for length in row:
            edges.append(edges[-1] + length)
        rows.append(edges + [total] * (width - len(edges)))
    return torch.tensor(rows, dtype=torch.int64)


def boundaries_from_positions(position_ids: Tensor) -> Tensor | None:
    """Return the documents of packed rows: one begins wherever the position does not rise by one. None when no row has two.

    Shapes: (B, S) -> (B, documents + 1), int64 on the CPU. Source: Hugging Face's convention for packed rows.
    """
    position_ids = position_ids.cpu()
    starts = torch.ones_like(position_ids, dtype=torch.bool)
    starts[:, 1:] = position_ids.diff(dim=1) != 1
    counts = starts.sum(1)
    if int(counts.max()) <= 1:
        return None
    length = position_ids.shape[1]
    rows = torch.full((position_ids.shape[0], int(counts.max()) + 1), length, dtype=torch.int64)
    for row, begin in enumerate(starts):
        edges = begin.nonzero().flatten()
        rows[row, : len(edges)] = edges
    return rows


def document_ids(boundaries: Tensor, length: int) -> Tensor:
    """Return for each token the number of its document.

    Shapes: (rows, documents + 1) -> (rows, S), int64.
    """
    tokens = torch.arange(length).expand(boundaries.shape[0], length).contiguous()
    return torch.searchsorted(boundaries[:, 1:].contiguous(), tokens, right=True)
