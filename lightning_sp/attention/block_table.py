"""The table of a FlexAttention `BlockMask`: which blocks of queries x keys its function decides, which are seen whole, and the rest, hidden."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from lightning_sp.attention.places import Places
from lightning_sp.errors import SequenceParallelError
from lightning_sp.layout import Range


@dataclass(frozen=True, eq=False)
class BlockTable:
    """What a `BlockMask` says besides its function, of the whole sequence.

    Args:
        asked: the blocks in which the function decides, (rows or 1, heads or 1, blocks of queries, blocks of keys), bool.
        whole: those that are seen whatever it says, likewise.
        size: queries and keys of a block.
        lengths: queries and keys; beyond them there is padding, and nothing is seen.
    """

    asked: Tensor
    whole: Tensor
    size: tuple[int, int]
    lengths: tuple[int, int]

    @classmethod
    def of(cls, block_mask: BlockMask) -> BlockTable:
        """Return that of a block mask, whose lists of blocks are read: where they and its function differ, the lists hold."""
        queries, keys = block_mask.seq_lengths
        blocks = -(-keys // block_mask.BLOCK_SIZE[1])
        asked = _listed(block_mask.kv_num_blocks, block_mask.kv_indices, blocks)
        whole = torch.zeros_like(asked)
        if block_mask.full_kv_num_blocks is not None and block_mask.full_kv_indices is not None:
            whole = _listed(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, blocks)
        return cls(asked, whole, (block_mask.BLOCK_SIZE[0], block_mask.BLOCK_SIZE[1]), (queries, keys))

    def check(self, *, length: int, batch: int, key_length: int, heads: int | None) -> None:
        """Refuse a table that is not of this attention; shorter than the padded sequence is fine, what is beyond is padding."""
        rows, own_heads = self.asked.shape[:2]
        fits = rows in (1, batch) and (heads is None or own_heads in (1, heads))
        if not fits or self.lengths[0] > length or self.lengths[1] > key_length:
            raise SequenceParallelError(
                f"a BlockMask of {rows} rows, {own_heads} heads, {self.lengths[0]} queries and {self.lengths[1]} keys: must be of 1 "
                f"or {batch} rows, 1 or {heads} heads, and of the whole sequence's {length} queries and {key_length} keys (padding included), "
                "not of a shard"
            )

    def of_places(self, places: Places) -> tuple[Tensor, Tensor]:
        """Return for each key of a tile whether the function decides, and whether it is seen in any case.

        Shapes: () -> (rows or 1, heads or 1, Sq, Sk) twice, bool.
        """
        there = [p < n for p, n in zip((places.queries, places.keys), self.lengths, strict=True)]
        rows, columns = (
            (p.clamp(max=n - 1) // size).to(self.asked.device)
            for p, n, size in zip((places.queries, places.keys), self.lengths, self.size, strict=True)
        )
        inside = there[0][:, None] & there[1]

        def taken(table: Tensor) -> Tensor:
            part = table[_held(table.shape[0], places.rows), _held(table.shape[1], places.heads)]
            return part[:, :, rows[:, None], columns].to(inside.device) & inside

        return taken(self.asked), taken(self.whole)


def _listed(counts: Tensor, blocks: Tensor, num_keys: int) -> Tensor:
    """Return the listed blocks as a table. Shapes: (rows, heads, n), (rows, heads, n, m) -> (rows, heads, n, num_keys), bool."""
    listed = torch.arange(blocks.shape[3], device=blocks.device) < counts[..., None]
    # What is not listed goes into a column of its own, which is cut off.
    places = torch.where(listed, blocks, num_keys).to(torch.int64)
    table = torch.zeros(*blocks.shape[:3], num_keys + 1, dtype=torch.bool, device=blocks.device)
    return table.scatter_(3, places, True)[..., :num_keys]


def _held(size: int, part: Range) -> slice:
    return slice(*part) if size > 1 else slice(None)
