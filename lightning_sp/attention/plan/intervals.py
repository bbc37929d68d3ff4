"""A mask as intervals: the keys [low, high) that each query sees, piece by piece. Pure functions; no process, no tensor of S x S.

Causality, windows, chunks, packed documents, padding and bidirectional runs each let a query see one run of neighbouring keys, whose ends
stand still or move on by one from a query to the next. So does what they allow together. A sequence is then a few pieces of queries:

    causal             low 0,      high moves            one document a piece       low stands, high moves
    window of W        low moves,  high moves            full, prefix, image        low stands, high stands

and a rank's part of it, in its own numbering of its tokens, is again such pieces. What a matrix or a function hides besides is known by blocks,
and cuts them into several runs of keys for the same queries (`restricted`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor

from lightning_sp.attention.spec.mask import AttentionMask
from lightning_sp.layout import Range as Range

Edge = Callable[[int], int]


@dataclass(frozen=True)
class Piece:
    """Queries [start, end), of which query i sees the keys [low + low_step * (i - start), high + high_step * (i - start)), one at least.

    Args:
        start: first query.
        end: after the last query.
        low: first key that the first query sees.
        low_step: 0 where that key is the same for all, 1 where it moves on with the query.
        high: after the last key that the first query sees.
        high_step: likewise.
    """

    start: int
    end: int
    low: int
    low_step: int
    high: int
    high_step: int


@dataclass(frozen=True)
class BlockSparsity:
    """Which blocks of queries x keys have something visible, of a map with as many blocks along either side.

    Args:
        size: queries and keys of a block.
        side: blocks along a side.
        table: a byte for each block, the keys' side last; 0 where all is hidden.
    """

    size: tuple[int, int]
    side: int
    table: bytes

    def runs(self, block: int) -> list[Range]:
        """Return the runs of keys that a block's queries see something of, rising and apart."""
        row = self.table[block * self.side : (block + 1) * self.side]
        edges = [i for i in range(self.side + 1) if (i > 0 and row[i - 1] > 0) != (i < self.side and row[i] > 0)]
        return [(a * self.size[1], b * self.size[1]) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def visible(mask: AttentionMask, row: int, length: int, key_length: int | None = None) -> list[list[Piece]]:
    """Return the pieces of a row of the batch, in global positions, by runs of keys; queries that see nothing are in none.

    The first list holds each query's first run. No kind of mask gives a query two so far; one that does adds a list here.

    Args:
        mask: what a query may see.
        row: of the batch; a mask of one row is that of all.
        length: global tokens, padding included.
        key_length: global keys of cross attention, padding included; None for those of the queries.
    """
    keys = length if key_length is None else key_length
    documents = _row(mask.boundaries, row, [0, length])
    if keys != length or mask.key_boundaries is not None:
        pairs = zip(pairwise(documents), pairwise(_row(mask.key_boundaries, row, [0, keys])), strict=True)
        paired = [
            Piece(start, end, low, 0, high, 0) for (start, end), (low, high) in pairs if start < end and low < high
        ]
        return [_joined(_within(paired, *_row(mask.valid, row, [0, keys])))]
    runs = [(a, b) for a, b in _row(mask.bidirectional, row, []) if a < b]
    left, right = mask.window_size
    chunk = mask.chunk_size or length
    edges = sorted({*documents, *range(0, length, chunk), length, *(edge for run in runs for edge in run)})
    starts = [a for a, _ in runs]
    pieces: list[Piece] = []
    for start, end in pairwise(edges):
        document = bisect_right(documents, start) - 1
        a, b = documents[document], documents[document + 1]
        chunk_start = start // chunk * chunk
        lowest, highest = max(a, chunk_start), min(b, chunk_start + chunk)
        number = bisect_right(starts, start) - 1
        run = runs[number] if number >= 0 and start < runs[number][1] else None
        # Within its document a run sees all of itself.
        run_low, run_high = (max(run[0], a), min(run[1], b)) if run else (length, 0)

        def low(i: int, lowest: int = lowest, run_low: int = run_low) -> int:
            return min(lowest if left is None else max(lowest, i - left), run_low)

        def high(i: int, highest: int = highest, run_high: int = run_high) -> int:
            ends = [highest, *([i + 1] if mask.causal else []), *([i + right + 1] if right is not None else [])]
            return max(min(ends), run_high)

        # Where a moving end meets one that stands still.
        cuts = [edge + left for edge in (lowest, run_low)] if left is not None else []
        for ahead in ([0] if mask.causal else []) + ([right] if right is not None else []):
            cuts += [edge - ahead - 1 for edge in (highest, run_high)]
        pieces += _pieces(start, end, cuts, low, high)
    return [_joined(_within(pieces, *_row(mask.valid, row, [0, length])))]


def restricted(pieces: Iterable[Piece], sparsity: BlockSparsity) -> list[list[Piece]]:
    """Return the pieces without the blocks that are hidden: the first holds each query's first run of keys, the next its second, and so on."""
    size = sparsity.size[0]
    found: list[list[Piece]] = []
    for piece in pieces:
        for block in range(piece.start // size, (piece.end - 1) // size + 1):
            part = _of_queries(piece, max(piece.start, block * size), min(piece.end, (block + 1) * size))
            for number, run in enumerate(sparsity.runs(block)):
                found += [[]] if number == len(found) else []
                found[number] += _within([part], *run)
    return [_joined(run) for run in found]


def _of_queries(piece: Piece, start: int, end: int) -> Piece:
    on = start - piece.start
    low, high = piece.low + piece.low_step * on, piece.high + piece.high_step * on
    return Piece(start, end, low, piece.low_step, high, piece.high_step)


def _within(pieces: Iterable[Piece], first: int, last: int) -> Iterable[Piece]:
    """Restrict the keys to [first, last)."""
    for piece in pieces:

        def low(i: int, piece: Piece = piece) -> int:
            return max(piece.low + piece.low_step * (i - piece.start), first)

        def high(i: int, piece: Piece = piece) -> int:
            return min(piece.high + piece.high_step * (i - piece.start), last)

        yield from _pieces(piece.start, piece.end, _cuts(piece, (first, last)), low, high)


def _cuts(piece: Piece, edges: Iterable[int]) -> list[int]:
    """Return the queries at which an end of what they see passes an edge between keys."""
    cuts = []
    for edge in edges:
        cuts += [piece.start + edge - piece.low] if piece.low_step else []
        # The query whose end is the edge sees nothing behind it, the next one does.
        cuts += [piece.start + edge - piece.high, piece.start + edge - piece.high + 1] if piece.high_step else []
    return cuts


def local(pieces: Iterable[Piece], queries: Sequence[Range], keys: Sequence[Range]) -> list[Piece]:
    """Return the pieces of one rank's queries against another's keys, each numbered in its rank's own order.

    Args:
        pieces: in global positions.
        queries: the global ranges that the one rank holds, in its order, rising.
        keys: the global ranges that the other holds, likewise.
    """
    edges = sorted({edge for each in keys for edge in each})
    found: list[Piece] = []
    offset = 0
    for begin, finish in queries:
        for piece in pieces:
            start, end = max(piece.start, begin), min(piece.end, finish)
            if start >= end:
                continue

            def low(i: int, piece: Piece = piece) -> int:
                return _count(keys, piece.low + piece.low_step * (i - piece.start))

            def high(i: int, piece: Piece = piece) -> int:
                return _count(keys, piece.high + piece.high_step * (i - piece.start))

            shift = offset - begin
            found += [
                Piece(p.start + shift, p.end + shift, p.low, p.low_step, p.high, p.high_step)
                for p in _pieces(start, end, _cuts(piece, edges), low, high)
            ]
        offset += finish - begin
    return _joined(sorted(found, key=lambda p: p.start))


def _pieces(start: int, end: int, cuts: Iterable[int], low: Edge, high: Edge) -> list[Piece]:
    """Cut queries where an end's step changes; one query that sees nothing stands for a piece that does not."""
    found = []
    for a, b in pairwise([start, *sorted({cut for cut in cuts if start < cut < end}), end]):
        steps = (low(a + 1) - low(a), high(a + 1) - high(a)) if b - a > 1 else (0, 0)
        if low(a) < high(a):
            found.append(Piece(a, b, low(a), steps[0], high(a), steps[1]))
    return found


def _joined(pieces: Iterable[Piece]) -> list[Piece]:
    """Join neighbours whose ends go on as before: a causal sequence cut in documents' chunks is one piece again."""
    joined: list[Piece] = []
    for piece in pieces:
        whole = _together(joined[-1], piece) if joined else None
        if whole is None:
            joined.append(piece)
        else:
            joined[-1] = whole
    return joined


def _together(a: Piece, b: Piece) -> Piece | None:
    if a.end != b.start:
        return None
    count = a.end - a.start
    steps = []
    for (x, x_step), (y, y_step) in (
        ((a.low, a.low_step), (b.low, b.low_step)),
        ((a.high, a.high_step), (b.high, b.high_step)),
    ):
        # The step of a single query is free.
        step = x_step if count > 1 else y_step if b.end - b.start > 1 else y - x
        if step not in (0, 1) or y != x + step * count or (b.end - b.start > 1 and y_step != step):
            return None
        steps.append(step)
    return Piece(a.start, b.end, a.low, steps[0], a.high, steps[1])


def _count(ranges: Sequence[Range], position: int) -> int:
    """Return how many tokens of the ranges lie before a position: the position in the ranges' own numbering."""
    return sum(min(max(position, start), end) - start for start, end in ranges)


def _row(tensor: Tensor | None, row: int, default: list[Any]) -> list[Any]:
    if tensor is None:
        return default
    found: list[Any] = tensor[row if tensor.shape[0] > 1 else 0].tolist()
    return found
