"""Which rectangles and triangles of queries x keys a ring step computes: pure functions of (layout, mask, ranks).

Every piece of `intervals` is at most three blocks, which any flash kernel computes and differentiates without a mask:

    low stands, high stands     full
    low stands, high moves      full | causal                causal: query i sees the keys up to the i-th
    low moves,  high stands     anticausal | full            anticausal: query i sees the keys from the i-th on
    both move (a window)        anticausal | full | causal, for every tile of its queries

Zigzag makes causal steps simple. Ring rank r holds chunks early(r) < late(r), and against source rank s has one block:

    s == r:  causal over the rank's own tokens (late sees early, both see themselves)
    s <  r:  all queries see early(s) and none of late(s)          -> only the first half of s's keys travels
    s >  r:  only late(r)'s queries see anything, and all of s's keys
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import lru_cache

from lightning_sp.attention.plan.intervals import BlockSparsity, Piece, Range, local, restricted, visible
from lightning_sp.attention.spec.mask import AttentionMask
from lightning_sp.layout import SequenceLayout

# Queries of a window's block on a CPU. Torch's kernel there computes triangles of up to 512 in full, so larger ones compute more of what is
# masked, and takes blocks of fewer queries than this in smaller steps (docs/log/windows.md).
WINDOW_TILE = 192


def tile_on(device_type: str) -> int | None:
    """Return the queries of a window's block; None for as many as the window is wide.

    CUDA's kernels skip what a triangle hides and take all blocks in one call, for which the keys of each are laid side by side: in tiles of
    192 that would be a window of 4,096 tokens eighteen times over, in two triangles as wide as the window it is twice.
    """
    return WINDOW_TILE if device_type == "cpu" else None


class Kind(Enum):
    """What of a block's rectangle its queries see."""

    FULL = "full"
    CAUSAL = "causal"
    ANTICAUSAL = "anticausal"


@dataclass(frozen=True)
class Block:
    """One kernel call.

    Args:
        queries: local range.
        keys: local range; as long as that of the queries unless the kind is full.
        kind: what of it is visible.
        row: of the batch; None for all.
        opens: whether no earlier block of the step holds one of its queries.
    """

    queries: Range
    keys: Range
    kind: Kind = Kind.FULL
    row: int | None = None
    opens: bool = True


@dataclass(frozen=True)
class AllGatherPlan:
    """One ring rank's queries against all keys that they see, which lie one after the other in the order of their positions.

    Args:
        keys: global ranges of those keys, rising and apart.
        blocks: on the keys as they lie then.
        parts: for each ring rank, those of its keys that are visible: (local range, where they lie), in its order.
    """

    keys: tuple[Range, ...]
    blocks: tuple[Block, ...]
    parts: tuple[tuple[tuple[Range, Range], ...], ...]

    @property
    def num_keys(self) -> int:
        """Return how many keys that are."""
        return sum(end - start for start, end in self.keys)


class Plan:
    """The blocks of one mask for all pairs of ring ranks, each made once. Make it by `plan_of`.

    Args:
        mask: what a query may see.
        layout: the degrees.
        length: global tokens.
        rows: of the batch.
        key_length: global keys of cross attention; None for those of the queries.
        sparsity: the blocks of which a matrix or a function leaves something visible; None where there is none.
        tile: `tile_on` the device.
    """

    def __init__(
        self, mask: AttentionMask, layout: SequenceLayout, length: int, rows: int, key_length: int | None = None,
        sparsity: BlockSparsity | None = None, tile: int | None = WINDOW_TILE,
    ) -> None:  # fmt: skip
        self.layout, self.length, self._tile = layout, length, tile
        self.key_length = length if key_length is None else key_length
        mask_rows = max((t.shape[0] for t in mask.run_tensors if t is not None), default=1)
        runs = [visible(mask, row, length, key_length) for row in range(mask_rows)]
        runs = runs[:1] if all(row == runs[0] for row in runs) else runs
        assert len(runs) in (1, rows)
        if sparsity is not None:
            runs = [[part for run in row for part in restricted(run, sparsity)] for row in runs]
        self._runs = runs
        self._steps: dict[Range, tuple[Block, ...]] = {}
        self._arriving: dict[Range, tuple[tuple[Range, ...], tuple[Block, ...]]] = {}
        self._all_gather: dict[int, AllGatherPlan] = {}

    def blocks(self, query_rank: int, key_rank: int) -> tuple[Block, ...]:
        """Return the blocks of ring rank `query_rank`'s queries against ring rank `key_rank`'s keys."""
        pair = (query_rank, key_rank)
        if pair not in self._steps:
            self._steps[pair] = self._between(query_rank, self._chunks(key_rank))
        return self._steps[pair]

    def arriving(self, query_rank: int, key_rank: int) -> tuple[tuple[Range, ...], tuple[Block, ...]]:
        """Return the ranges of ring rank `key_rank`'s keys that travel to `query_rank`, and the blocks on them as they lie then."""
        pair = (query_rank, key_rank)
        if pair not in self._arriving:
            blocks = self.blocks(query_rank, key_rank)
            ranges = key_ranges(blocks)
            self._arriving[pair] = tuple(ranges), tuple(renumbered(blocks, ranges))
        return self._arriving[pair]

    def all_gather(self, query_rank: int) -> AllGatherPlan:
        """Return the blocks of a ring rank's queries against all keys at once."""
        if query_rank not in self._all_gather:
            blocks = self._between(query_rank, ((0, self.key_length),))
            ranges = key_ranges(blocks)
            parts = tuple(_parts(self._chunks(rank), ranges) for rank in range(self.layout.ring_size))
            self._all_gather[query_rank] = AllGatherPlan(tuple(ranges), tuple(renumbered(blocks, ranges)), parts)
        return self._all_gather[query_rank]

    def _chunks(self, key_rank: int) -> Sequence[Range]:
        return self.layout.for_length(self.key_length).ring_chunks(self.key_length, key_rank)

    def _between(self, query_rank: int, keys: Sequence[Range]) -> tuple[Block, ...]:
        queries = self.layout.ring_chunks(self.length, query_rank)
        return tuple(
            # Only a query's first run of keys is sure to come before its others.
            block if number == 0 else replace(block, opens=False)
            for row, runs in enumerate(self._runs)
            for number, pieces in enumerate(runs)
            for piece in local(pieces, queries, keys)
            for block in _blocks(piece, None if len(self._runs) == 1 else row, self._tile)
        )


def plan_of(
    mask: AttentionMask, layout: SequenceLayout, length: int, rows: int, key_length: int | None = None,
    sparsity: BlockSparsity | None = None, tile: int | None = WINDOW_TILE,
) -> Plan:  # fmt: skip
    """Return the plan of a mask, the same for masks of the same contents: all layers of a model share it."""
    return _plan(_MaskContents(mask.contents, mask), layout, length, rows, key_length, sparsity, tile)


@dataclass(frozen=True)
class _MaskContents:
    """What masks are compared by."""

    contents: tuple[object, ...]
    mask: AttentionMask = field(compare=False)


@lru_cache(maxsize=32)
def _plan(
    contents: _MaskContents,
    layout: SequenceLayout,
    length: int,
    rows: int,
    key_length: int | None,
    sparsity: BlockSparsity | None,
    tile: int | None,
) -> Plan:
    return Plan(contents.mask, layout, length, rows, key_length, sparsity, tile)


def key_ranges(blocks: Iterable[Block]) -> list[Range]:
    """Return the local ranges of keys that the blocks need, rising and apart: what has to travel."""
    ranges: list[Range] = []
    for start, end in sorted({block.keys for block in blocks}):
        if ranges and start <= ranges[-1][1]:
            ranges[-1] = (ranges[-1][0], max(end, ranges[-1][1]))
        else:
            ranges.append((start, end))
    return ranges


def renumbered(blocks: Iterable[Block], ranges: Sequence[Range]) -> list[Block]:
    """Return the blocks with keys numbered as they lie in the ranges, one after the other: as they travelled."""
    found = []
    for block in blocks:
        offset = 0
        for start, end in ranges:
            if start <= block.keys[0] < end:
                low, high = block.keys[0] - start + offset, block.keys[1] - start + offset
                found.append(Block(block.queries, (low, high), block.kind, block.row, block.opens))
                break
            offset += end - start
    return found


def _parts(chunks: Sequence[Range], ranges: Sequence[Range]) -> tuple[tuple[Range, Range], ...]:
    """Return what of a rank's chunks lies in the ranges: (local range, range in the numbering of the ranges)."""
    found, offset = [], 0
    for begin, finish in chunks:
        landed = 0
        for start, end in ranges:
            low, high = max(start, begin), min(end, finish)
            if low < high:
                landing = landed + low - start
                found.append(((offset + low - begin, offset + high - begin), (landing, landing + high - low)))
            landed += end - start
        offset += finish - begin
    return tuple(found)


def _blocks(piece: Piece, row: int | None, tile: int | None) -> Iterable[Block]:
    if not (piece.low_step and piece.high_step):
        yield from _tile(piece, piece.start, piece.end, row)
        return
    # As many queries as both triangles have room for side by side.
    widest = max(1, piece.high - piece.low - 1)
    size = widest if tile is None else min(tile, widest)
    for start in range(piece.start, piece.end, size):
        yield from _tile(piece, start, min(start + size, piece.end), row)


def _tile(piece: Piece, start: int, end: int, row: int | None) -> Iterable[Block]:
    low = piece.low + piece.low_step * (start - piece.start)
    high = piece.high + piece.high_step * (start - piece.start)
    count, queries = end - start, (start, end)
    if count == 1:
        yield Block(queries, (low, high), Kind.FULL, row)
        return
    opens = True
    full = (low + count if piece.low_step else low, high - 1 if piece.high_step else high)
    for keys, kind in (
        ((low, low + count), Kind.ANTICAUSAL) if piece.low_step else (None, Kind.FULL),
        (full, Kind.FULL) if full[0] < full[1] else (None, Kind.FULL),
        ((high - 1, high - 1 + count), Kind.CAUSAL) if piece.high_step else (None, Kind.FULL),
    ):
        if keys is not None:
            yield Block(queries, keys, kind, row, opens)
            opens = False
