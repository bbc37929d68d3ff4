"""Which blocks of queries x keys an arbitrary mask leaves visible: what it hides whole neither travels nor is computed.

A matrix or a function of positions does not say what it hides. So each rank of a ring looks at its own queries, block by block. The ranks
join what they find into one map of the whole attention, from which each knows what the others need of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_sp import comm
from lightning_sp.attention.plan.blocks import Plan
from lightning_sp.attention.plan.intervals import BlockSparsity
from lightning_sp.attention.spec.codec import Code, hides_by_matrix_or_function
from lightning_sp.attention.spec.positions import ScorePositions, global_positions
from lightning_sp.attention.spec.scores import SCORE_TILE, Scores
from lightning_sp.errors import SequenceParallelError
from lightning_sp.layout import Range

# Blocks along a side of the map, whatever the lengths: its shape is known before they are.
SIDE = 64
_FAILED = 2  # in the map, of a rank that could not look


def empty_map(code: Code, ranks: int) -> Tensor:
    """Return room for the map; nothing where no mask is searched. Shapes: () -> (SIDE, SIDE) or (0,), uint8 on the CPU.

    Args:
        code: of the attention.
        ranks: that share the sequence.
    """
    searched = ranks > 1 and hides_by_matrix_or_function(code)
    return torch.empty((SIDE, SIDE) if searched else 0, dtype=torch.uint8, device="cpu")


def block_size(length: int) -> int:
    """Return the tokens of a block: a tile of the kernel where that makes no more than SIDE blocks, less in a short sequence."""
    return max(-(-length // SIDE), min(SCORE_TILE, -(-length // 16)))


def of_map(found: Tensor, length: int, key_length: int) -> BlockSparsity | None:
    """Return the map as a plan takes it. Shapes: found as `empty_map`'s."""
    if not found.numel():
        return None
    return BlockSparsity((block_size(length), block_size(key_length)), SIDE, found.numpy().tobytes())


def search(
    scores: Scores, plan: Plan, rank: int, heads: Range, like: Tensor, groups: tuple[ProcessGroup | None, ProcessGroup | None]
) -> Tensor:  # fmt: skip
    """Return which blocks some query of a row and head sees.

    Args:
        scores: with the mask to be searched.
        plan: what the rest of the mask leaves visible: nothing else is searched.
        rank: in the ring.
        heads: query heads of this rank.
        like: queries, for their rows and device.
        groups: of the ring, whose map it is, and of Ulysses, whose ranks have heads, and maps, of their own; None for one rank.

    Shapes: () -> (SIDE, SIDE), uint8 on the CPU. Communicates: one all_reduce of 4 KiB in the ring, one of a byte in Ulysses' group.

    Raises:
        SequenceParallelError: the mask's function raised on another rank of the sequence; on this one whatever it raised.
    """
    found = torch.zeros(SIDE, SIDE, dtype=torch.uint8)
    error: Exception | None = None
    try:
        at_once = plan.all_gather(rank)
        queries = global_positions(plan.layout.ring_chunks(plan.length, rank), like.device)
        positions = ScorePositions((0, like.shape[0]), heads, queries, global_positions(at_once.keys, like.device))
        for block in at_once.blocks:
            part = positions.part(row=block.row, queries=slice(*block.queries), keys=slice(*block.keys))
            for at, tile in _tiles(part, block_size(plan.length), block_size(plan.key_length)):
                if not found[at]:
                    found[at] = int(_is_visible(scores, tile))
    except Exception as raised:  # whatever a user's function may raise: the others wait for this rank's part
        error = raised
        found.fill_(_FAILED)
    ring, ulysses = groups
    found = found if ring is None else comm.largest(found.to(like.device), ring).cpu()
    failed = found.max()
    failed = failed if ulysses is None else comm.largest(failed.to(like.device), ulysses).cpu()
    if error is not None:
        raise error
    if int(failed) == _FAILED:
        raise SequenceParallelError(
            "the attention's mask_mod or dense mask failed on another rank of the sequence, which says why: it is asked for positions in the "
            f"whole sequence, here {plan.length} queries and {plan.key_length} keys, padding included"
        )
    return found


def _is_visible(scores: Scores, tile: ScorePositions) -> bool:
    """Return whether something of a tile is visible. A sample says so of most tiles; only where it finds nothing is all of it looked at.

    The last positions are in it: a tensor of a function's that is too short is found out here, where all ranks hear of it.
    """
    sample = ScorePositions(tile.rows, tile.heads, *(torch.cat([p[:-1:8], p[-1:]]) for p in (tile.queries, tile.keys)))
    for part in (sample, tile):
        hidden = scores.hidden(part)
        if hidden is None or not bool(hidden.all()):
            return True
    return False


def _tiles(positions: ScorePositions, queries: int, keys: int) -> Iterator[tuple[tuple[int, int], ScorePositions]]:
    """Yield the parts of a block of the plan that lie in one block of the map each, no larger than a kernel's tile."""
    columns = list(_runs(positions.keys, keys))
    for row, own in _runs(positions.queries, queries):
        for column, run in columns:
            yield (row, column), positions.part(queries=own, keys=run)


def _runs(positions: Tensor, size: int) -> Iterator[tuple[int, slice]]:
    """Yield (block, slice) of rising positions."""
    numbers, counts = torch.unique_consecutive(positions.cpu() // size, return_counts=True)
    start = 0
    for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
        edges = [*range(start, start + count, SCORE_TILE), start + count]
        yield from ((number, slice(a, b)) for a, b in pairwise(edges))
        start += count
