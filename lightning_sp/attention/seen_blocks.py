"""Which blocks of queries x keys an arbitrary mask lets be seen: what it hides whole neither travels nor is computed.

A matrix or a function of places does not say what it hides. So each rank of a ring looks at its own queries, block by block, and the ranks join
what they find into one map of the whole attention, from which each knows what the others need of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_sp import comm
from lightning_sp.attention.intervals import SeenBlocks
from lightning_sp.attention.places import Places, positions_of
from lightning_sp.attention.plan import Plan
from lightning_sp.attention.scores import Scores
from lightning_sp.attention.tiled import TILE
from lightning_sp.errors import SequenceParallelError
from lightning_sp.layout import Range

# Blocks along a side of the map, whatever the lengths: its shape is known before they are.
SIDE = 64
_FAILED = 2  # in the map, of a rank that could not look


def empty_map(scores: Scores, ring_size: int) -> Tensor:
    """Return room for the map; nothing where no mask is searched. Shapes: () -> (SIDE, SIDE) or (0,), uint8 on the CPU."""
    searched = ring_size > 1 and (scores.dense is not None or scores.mask_mod is not None)
    return torch.empty((SIDE, SIDE) if searched else 0, dtype=torch.uint8, device="cpu")


def block_size(length: int) -> int:
    """Return the tokens of a block: a tile of the kernel where that makes no more than SIDE blocks, less in a short sequence."""
    return max(-(-length // SIDE), min(TILE, -(-length // 16)))


def of_map(found: Tensor, plan: Plan) -> SeenBlocks | None:
    """Return the map as a plan takes it. Shapes: found as `empty_map`'s."""
    if not found.numel():
        return None
    return SeenBlocks((block_size(plan.length), block_size(plan.key_length)), SIDE, found.numpy().tobytes())


def search(scores: Scores, plan: Plan, rank: int, heads: Range, like: Tensor, group: ProcessGroup) -> Tensor:
    """Return which blocks some query of a row and head sees.

    Args:
        scores: with the mask to be searched.
        plan: what the rest of the mask lets be seen: nothing else is searched.
        rank: in the ring.
        heads: query heads of this rank.
        like: queries, for their rows and device.
        group: of the ring; with heads of their own, Ulysses' ranks search on their own.

    Shapes: () -> (SIDE, SIDE), uint8 on the CPU. Communicates: one all_reduce of 4 KiB.

    Raises:
        SequenceParallelError: the mask's function raised on another rank; on this one whatever it raised.
    """
    found = torch.zeros(SIDE, SIDE, dtype=torch.uint8)
    error: Exception | None = None
    try:
        gathered = plan.gathered(rank)
        queries = positions_of(plan.layout.ring_chunks(plan.length, rank), like.device)
        places = Places((0, like.shape[0]), heads, queries, positions_of(gathered.keys, like.device))
        for block in gathered.blocks:
            part = places.part(row=block.row, queries=slice(*block.queries), keys=slice(*block.keys))
            for at, tile in _tiles(part, block_size(plan.length), block_size(plan.key_length)):
                if not found[at]:
                    found[at] = int(_is_seen(scores, tile))
    except Exception as raised:  # whatever a user's function may raise: the others wait for this rank's part
        error = raised
        found.fill_(_FAILED)
    found = comm.largest(found.to(like.device), group).cpu()
    if error is not None:
        raise error
    if int(found.max()) == _FAILED:
        raise SequenceParallelError(
            "the attention's mask_mod or dense mask failed on another rank of the ring, which says why: it is asked for places in the whole "
            f"sequence, here {plan.length} queries and {plan.key_length} keys, padding included"
        )
    return found


def _is_seen(scores: Scores, tile: Places) -> bool:
    """Return whether something of a tile is seen. A sample says so of most tiles; only where it sees nothing is all of it looked at."""
    sample = slice(None, None, 8)
    for part in (tile.part(queries=sample, keys=sample), tile):
        hidden = scores.hidden(part)
        if hidden is None or not bool(hidden.all()):
            return True
    return False


def _tiles(places: Places, queries: int, keys: int) -> Iterator[tuple[tuple[int, int], Places]]:
    """Yield the parts of a block of the plan that lie in one block of the map each, no larger than a kernel's tile."""
    columns = list(_parts(places.keys, keys))
    for row, own in _parts(places.queries, queries):
        for column, held in columns:
            yield (row, column), places.part(queries=own, keys=held)


def _parts(positions: Tensor, size: int) -> Iterator[tuple[int, slice]]:
    """Yield (block, slice) of rising positions."""
    numbers, counts = torch.unique_consecutive(positions.cpu() // size, return_counts=True)
    start = 0
    for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
        edges = [*range(start, start + count, TILE), start + count]
        yield from ((number, slice(a, b)) for a, b in pairwise(edges))
        start += count
