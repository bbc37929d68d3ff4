"""Which rectangles of queries x keys a ring step computes: pure functions of (layout, mask, ranks). No process, no collective.

Zigzag makes each step simple. Ring rank r holds chunks early(r) < late(r). For causal attention against source rank s:

    s == r:  causal square over the rank's own tokens (late sees early, both see themselves)
    s <  r:  all queries see early(s) and none of late(s)          -> only the first half of s's keys travels
    s >  r:  only late(r)'s queries see anything, and all of s's keys

A document intersects both chunks of a rank only if it also covers all between them, so its tokens are contiguous in local order: one
rectangle a document and step. Every query's own position lies in step s == r, so each row is initialised there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from lightning_sp.layout import SequenceLayout

Range = tuple[int, int]


@dataclass(frozen=True)
class Block:
    """One kernel call: local ranges of queries and keys, of one row of the batch or of all (None)."""

    queries: Range
    keys: Range
    causal: bool
    row: int | None = None


def plan_step(
    layout: SequenceLayout,
    length: int,
    documents: Sequence[Sequence[int]] | None,
    causal: bool,
    query_rank: int,
    key_rank: int,
) -> list[Block]:
    """Return the blocks of ring rank `query_rank`'s queries against ring rank `key_rank`'s keys.

    Args:
        layout: the degrees.
        length: global sequence length, in tokens.
        documents: boundaries per row (one row: for all), None for one document.
        causal: whether a query sees no later key.
        query_rank: ring rank that holds the queries.
        key_rank: ring rank that holds the keys.
    """
    query_chunks, key_chunks = layout.ring_chunks(length, query_rank), layout.ring_chunks(length, key_rank)
    rows = [(0, length)] if documents is None else documents
    blocks = []
    for row, edges in enumerate(rows):
        for start, end in pairwise(edges):
            queries, keys = _pieces(query_chunks, start, end), _pieces(key_chunks, start, end)
            if causal and query_rank > key_rank:
                keys = keys[:1]
            elif causal and query_rank < key_rank:
                queries = queries[1:]
            q, k = _join(queries), _join(keys)
            if q and k:
                blocks.append(Block(q, k, causal and query_rank == key_rank, None if len(rows) == 1 else row))
    return blocks


def key_range(blocks: Sequence[Block]) -> Range:
    """Return the smallest local range that holds the keys of all blocks: what has to travel. (0, 0) when there is no block."""
    if not blocks:
        return (0, 0)
    return (min(b.keys[0] for b in blocks), max(b.keys[1] for b in blocks))


def _pieces(chunks: Sequence[Range], start: int, end: int) -> list[Range | None]:
    """Return a document's local range in each chunk."""
    pieces: list[Range | None] = []
    offset = 0
    for low, high in chunks:
        first, last = max(low, start), min(high, end)
        pieces.append((offset + first - low, offset + last - low) if first < last else None)
        offset += high - low
    return pieces


def _join(pieces: Sequence[Range | None]) -> Range | None:
    present = [p for p in pieces if p]
    return (present[0][0], present[-1][1]) if present else None
