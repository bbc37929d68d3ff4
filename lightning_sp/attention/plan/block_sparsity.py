"""Which blocks of queries x keys an arbitrary mask leaves visible: what it hides whole neither travels nor is computed.

A matrix or a function of positions does not say what it hides. So each rank of a ring looks at its own queries, block by block. The ranks
join what they find into one map of the whole attention, from which each knows what the others need of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
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
from lightning_sp.devices import copies_on, makes_host_wait
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
    device, known = like.device, torch.zeros(SIDE, SIDE, dtype=torch.uint8)
    (found,) = copies_on([known], device)  # on a CPU the same numbers: what is found there is looked at no more
    error: Exception | None = None
    try:
        at_once = plan.all_gather(rank)
        queries = _Side.of(plan.layout.ring_chunks(plan.length, rank), plan.length, device)
        keys = _Side.of(at_once.keys, plan.key_length, device)
        for stride in (SAMPLE, 1):
            for block in at_once.blocks:
                rows = (0, like.shape[0]) if block.row is None else (block.row, block.row + 1)
                part = queries.part(slice(*block.queries)), keys.part(slice(*block.keys))
                _look(partial(_visible_blocks, scores, rows, heads), *part, stride, known, found)
            if stride > 1:
                known = found.cpu()  # for which the host waits once
    except Exception as raised:  # whatever a user's function may raise: the others wait for this rank's part
        error = raised
        found.fill_(_FAILED)
    ring, ulysses = groups
    found = found if ring is None else comm.largest(found, ring)
    failed = found.max() if ulysses is None else comm.largest(found.max(), ulysses)
    answer = torch.cat([found.flatten(), failed.view(1)]).cpu()
    if error is not None:
        raise error
    if int(answer[-1]) == _FAILED:
        raise SequenceParallelError(
            "the attention's mask_mod or dense mask failed on another rank of the sequence, which says why: it is asked for positions in the "
            f"whole sequence, here {plan.length} queries and {plan.key_length} keys, padding included"
        )
    return answer[:-1].view(SIDE, SIDE)


class _Side(NamedTuple):
    """Positions of a side of the attention, on the host and on the device, and their blocks there. Shapes: (S,) each, int64."""

    host: Tensor
    here: Tensor
    host_blocks: Tensor
    blocks: Tensor

    @classmethod
    def of(cls, chunks: Sequence[Range], length: int, device: torch.device) -> _Side:
        """Return those of some ranges of a sequence."""
        positions = global_positions(chunks, torch.device("cpu"))
        blocks = positions // block_size(length)
        here, blocks_here = copies_on([positions, blocks], device)
        return cls(positions, here, blocks, blocks_here)

    def part(self, tokens: slice) -> _Side:
        return _Side(*(each[tokens] for each in self))

    def sample(self, stride: int) -> _Side:
        """Return every `stride`-th, and the last."""
        return _Side(*(torch.cat([each[:-1:stride], each[-1:]]) for each in self))

    def tiles(self) -> list[_Side]:
        return [_Side(*each) for each in zip(*(torch.split(t, SCORE_TILE) for t in self), strict=True)]


def _look(
    visible_blocks: Callable[[_Side, _Side], Tensor], queries: _Side, keys: _Side, stride: int, known: Tensor, found: Tensor
) -> None:  # fmt: skip
    """Add to `found` the blocks of a part of the attention in which something is visible, but for those that are known.

    A sample says so of most; only what it does not find is looked at whole, a kernel's tile at a time, be there many blocks in it. The last
    positions are in the sample: a tensor of a function's that is too short is found out here, where all ranks hear of it.
    """
    if stride > 1 and max(queries.host.numel(), keys.host.numel()) <= SCORE_TILE:
        return  # short: looked at whole at once
    for own, run in product(queries.sample(stride).tiles(), keys.sample(stride).tiles()):
        if not bool(known[torch.unique(own.host_blocks)][:, torch.unique(run.host_blocks)].all()):
            found |= visible_blocks(own, run)


def _visible_blocks(scores: Scores, rows: Range, heads: Range, queries: _Side, keys: _Side) -> Tensor:
    """Return the blocks of a tile of which some row and head sees something. Shapes: () -> (SIDE, SIDE), uint8 on the device."""
    hidden = scores.hidden(ScorePositions(rows, heads, queries.here, keys.here))
    if hidden is not None and not makes_host_wait(hidden) and bool(hidden.all()):  # what the sample has left mostly is
        return torch.zeros(SIDE, SIDE, dtype=torch.uint8)
    shape = (queries.here.numel(), keys.here.numel())
    seen = torch.ones(shape, device=queries.here.device) if hidden is None else (~hidden).flatten(0, 1).any(0)
    blocks = torch.arange(SIDE, device=queries.here.device)
    of_rows, of_columns = ((side.blocks[:, None] == blocks).float() for side in (queries, keys))
    return (of_rows.T @ seen.expand(shape).float() @ of_columns > 0).to(torch.uint8)
