"""The mask as a value: which keys a query may see, in global positions. Never a dense S x S tensor."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_sp.errors import SequenceParallelError


@dataclass(frozen=True, eq=False)
class AttentionMask:
    """Causal or full attention, within documents where the sequence is packed.

    Args:
        causal: A query sees no key after its own position.
        boundaries: Packed documents per row, int64 on the CPU, shape (rows, documents + 1), rows = batch or 1 for all; each row rises
            from 0 to the global sequence length, and repeats that length where it has fewer documents. None: one document.
    """

    causal: bool = True
    boundaries: Tensor | None = None
    # Read once: where torch.compile traces the attention, a number out of a tensor would break the graph.
    _length: int | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        b = self.boundaries
        if b is None:
            return
        if b.dim() != 2 or b.dtype != torch.int64 or b.device.type != "cpu" or b.shape[1] < 2:
            raise SequenceParallelError(
                f"boundaries of shape {tuple(b.shape)}, {b.dtype} on {b.device}: must be int64 on the CPU, (rows, documents + 1)"
            )
        if bool((b[:, 0] != 0).any()) or bool((b.diff(dim=1) < 0).any()) or bool((b[:, -1] != b[0, -1]).any()):
            raise SequenceParallelError(
                f"boundaries {b.tolist()}: each row must rise from 0 to the sequence length, the same in all rows"
            )
        object.__setattr__(self, "_length", int(b[0, -1]))

    def check(self, *, length: int, batch: int) -> None:
        """Refuse boundaries that do not fit the global length or the batch."""
        b = self.boundaries
        if b is None:
            return
        if self._length != length:
            raise SequenceParallelError(
                f"the documents' boundaries end at {self._length} tokens, the (padded) sequence has {length}: they must be equal"
            )
        if b.shape[0] not in (1, batch):
            raise SequenceParallelError(
                f"boundaries for {b.shape[0]} rows, but the batch has {batch}: must be 1 or {batch}"
            )


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
