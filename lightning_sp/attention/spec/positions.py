"""Where the scores of a kernel call lie in the whole attention: what a bias, a function of positions or dropout has to know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sp.layout import Range


@dataclass(frozen=True)
class ScorePositions:
    """The rows, query heads, queries and keys of a call, in the whole attention's numbers.

    Args:
        rows: of the batch.
        heads: query heads.
        queries: global position of each query, (Sq,), int64.
        keys: global position of each key, (Sk,), int64.
    """

    rows: Range
    heads: Range
    queries: Tensor
    keys: Tensor

    def part(self, *, row: int | None = None, queries: slice, keys: slice) -> ScorePositions:
        """Return those of a block of the call."""
        rows = self.rows if row is None else (self.rows[0] + row, self.rows[0] + row + 1)
        return ScorePositions(rows, self.heads, self.queries[queries], self.keys[keys])

    def of_heads(self, heads: Range) -> ScorePositions:
        """Return those of some of the call's query heads, in the call's numbers."""
        start = self.heads[0]
        return ScorePositions(self.rows, (start + heads[0], start + heads[1]), self.queries, self.keys)

    def flipped(self) -> ScorePositions:
        """Return those of the call read backwards."""
        return ScorePositions(self.rows, self.heads, self.queries.flip(0), self.keys.flip(0))


def whole_positions(q: Tensor, k: Tensor) -> ScorePositions:
    """Return the positions of all scores of a whole attention. Shapes: q (B, H, S, D), k (B, K, T, D)."""
    queries, keys = (torch.arange(t.shape[2], device=q.device) for t in (q, k))
    return ScorePositions((0, q.shape[0]), (0, q.shape[1]), queries, keys)


def rows_or_heads_slice(size: int, part: Range) -> slice:
    """Return the part of a tensor's rows or heads, of which one stands for all."""
    return slice(*part) if size > 1 else slice(None)


def global_positions(chunks: Sequence[Range], device: torch.device, ranges: Sequence[Range] | None = None) -> Tensor:
    """Return the global positions of a rank's tokens, or of those in some local ranges, one after the other.

    Args:
        chunks: the global ranges that the rank holds, in its order.
        device: of the result.
        ranges: local ranges, None for all.

    Shapes: () -> (tokens,), int64.
    """
    whole = torch.cat([torch.arange(start, end) for start, end in chunks] or [torch.arange(0)])
    if ranges is not None:
        whole = torch.cat([whole[start:end] for start, end in ranges] or [whole[:0]])
    return whole.to(device)
