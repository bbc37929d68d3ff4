"""Which blocks of queries x keys an arbitrary mask leaves visible: what it hides whole neither travels nor is computed.

A matrix or a function of positions does not say what it hides. So each rank of a ring looks at its own queries, block by block. The ranks
join what they find into one map of the whole attention, from which each knows what the others need of it.
"""

from __future__ import annotations

from itertools import product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_sp import comm
from lightning_sp.attention.plan.blocks import Plan
from lightning_sp.attention.plan.intervals import BlockSparsity
from lightning_sp.attention.spec.codec import Code, hides_by_matrix_or_function
from lightning_sp.attention.spec.function_contents import Contents, UnknownContentsError
from lightning_sp.attention.spec.positions import ScorePositions, global_positions
from lightning_sp.attention.spec.scores import SCORE_TILE, Scores
from lightning_sp.errors import SequenceParallelError
from lightning_sp.layout import Range

# Blocks along a side of the map, whatever the lengths: its shape is known before they are.
SIDE = 64
SAMPLE = 8  # every eighth position along a side
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

    Shapes: () -> (SIDE, SIDE), uint8 on the CPU. Communicates: one all_reduce of 4 KiB in the ring, one of a byte in Ulysses' group; nothing
    where the step has searched the same mask.

    Raises:
        SequenceParallelError: the mask's function raised on another rank of the sequence; on this one whatever it raised.
    """
    contents = Contents()
    try:
        key = (
            (scores.hidden_by(contents), plan, rank, heads, like.shape[0], like.device, groups)
            if _maps is not None
            else None
        )
    except UnknownContentsError:
        key = None
    if key is None or _maps is None:
        return _searched(scores, plan, rank, heads, like, groups)
    known = _maps.get(key)
    if known is None or any(each.expired() for each in known.storages):  # type: ignore[no-untyped-call]
        known = _maps[key] = _Known(_searched(scores, plan, rank, heads, like, groups), contents.storages)
    return known.found.clone()  # an operator's own


class _Known(NamedTuple):
    """A map, and the memory of the tensors that it was made of: another tensor may be there when that is freed."""

    found: Tensor
    storages: list[StorageWeakRef]


_maps: dict[Any, _Known] | None = None


def search_once(*, is_on: bool) -> None:
    """Search each mask once, from now on until this is switched off, or on again: in a step, whose layers share their masks."""
    global _maps
    _maps = {} if is_on else None


def _searched(
    scores: Scores, plan: Plan, rank: int, heads: Range, like: Tensor, groups: tuple[ProcessGroup | None, ProcessGroup | None]
) -> Tensor:  # fmt: skip
    found = torch.zeros(SIDE, SIDE, dtype=torch.uint8)
    error: Exception | None = None
    try:
        at_once = plan.all_gather(rank)
        queries = global_positions(plan.layout.ring_chunks(plan.length, rank), like.device)
        positions = ScorePositions((0, like.shape[0]), heads, queries, global_positions(at_once.keys, like.device))
        for block in at_once.blocks:
            part = positions.part(row=block.row, queries=slice(*block.queries), keys=slice(*block.keys))
            _look(scores, part, (block_size(plan.length), block_size(plan.key_length)), found)
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


def _look(scores: Scores, part: ScorePositions, sizes: tuple[int, int], found: Tensor) -> None:
    """Add the blocks of a part of the attention in which something is visible.

    A sample says so of most; only what it does not find is looked at whole, a kernel's tile at a time, be there many blocks in it. The last
    positions are in the sample: a tensor of a function's that is too short is found out here, where all ranks hear of it.
    """
    is_short = max(part.queries.numel(), part.keys.numel()) <= SCORE_TILE
    for stride in (1,) if is_short else (SAMPLE, 1):
        queries, keys = (torch.cat([p[:-1:stride], p[-1:]]) for p in (part.queries, part.keys))
        for own, run in product(*(torch.split(p, SCORE_TILE) for p in (queries, keys))):
            rows, columns = own.cpu() // sizes[0], run.cpu() // sizes[1]
            if not bool(found[torch.unique(rows)][:, torch.unique(columns)].all()):
                found |= _visible_blocks(scores, ScorePositions(part.rows, part.heads, own, run), rows, columns)


def _visible_blocks(scores: Scores, tile: ScorePositions, rows: Tensor, columns: Tensor) -> Tensor:
    """Return the blocks of a tile of which some row and head sees something. Shapes: rows (Sq,), columns (Sk,) -> (SIDE, SIDE)."""
    hidden = scores.hidden(tile)
    if hidden is not None and bool(hidden.all()):  # what the sample has left mostly is
        return torch.zeros(SIDE, SIDE, dtype=torch.uint8)
    shape = (rows.numel(), columns.numel())
    visible = torch.ones(shape) if hidden is None else (~hidden).flatten(0, 1).any(0).expand(shape).cpu().float()
    of_rows, of_columns = (F.one_hot(blocks, SIDE).float() for blocks in (rows, columns))
    return (of_rows.T @ visible @ of_columns > 0).to(torch.uint8)
