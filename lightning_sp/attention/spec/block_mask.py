"""The table of a FlexAttention `BlockMask`: the blocks of queries x keys that its function decides, those visible whole, the rest hidden."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from lightning_sp.attention.spec.positions import ScorePositions, rows_or_heads_slice
from lightning_sp.errors import SequenceParallelError


@dataclass(frozen=True, eq=False)
class BlockTable:
    """What a `BlockMask` says besides its function, of the whole sequence.

    Args:
        asked: the blocks in which the function decides, (rows or 1, heads or 1, blocks of queries, blocks of keys), bool.
        whole: those that are visible whatever it says, likewise.
        size: queries and keys of a block.
        lengths: queries and keys; beyond them there is padding, and nothing is visible.
        lists: of the blocks, as the `BlockMask` has them, by which tables are told apart.
    """

    asked: Tensor
    whole: Tensor
    size: tuple[int, int]
    lengths: tuple[int, int]
    lists: tuple[Tensor, ...] = ()

    @classmethod
    def of(cls, block_mask: BlockMask) -> BlockTable:
        """Return that of a block mask, whose lists of blocks are read: where they and its function differ, the lists hold.

        Raises:
            SequenceParallelError: lists of another form than its lengths and blocks ask for.
        """
        lengths = (block_mask.seq_lengths[0], block_mask.seq_lengths[1])
        size = (block_mask.BLOCK_SIZE[0], block_mask.BLOCK_SIZE[1])
        blocks = (-(-lengths[0] // size[0]), -(-lengths[1] // size[1]))
        given = [(block_mask.kv_num_blocks, block_mask.kv_indices)]
        if block_mask.full_kv_num_blocks is not None and block_mask.full_kv_indices is not None:
            given.append((block_mask.full_kv_num_blocks, block_mask.full_kv_indices))
        for counts, indices in given:
            fits = counts.dim() == 3 and indices.dim() == 4 and counts.shape == indices.shape[:3]
            if not fits or counts.shape[2] != blocks[0] or bool((counts > indices.shape[3]).any()):
                raise SequenceParallelError(
                    f"a BlockMask of {lengths[0]} queries and {lengths[1]} keys in blocks of {size} with lists of shapes "
                    f"{tuple(counts.shape)} and {tuple(indices.shape)}: must be (rows, heads, {blocks[0]}) and (rows, heads, {blocks[0]}, "
                    "blocks of keys); a part of a BlockMask keeps the lengths of the whole, so make one of its own"
                )
        asked, *full = (_listed(counts, indices, blocks[1]) for counts, indices in given)
        lists = tuple(each for pair in given for each in pair)
        return cls(asked, full[0] if full else torch.zeros_like(asked), size, lengths, lists)

    def check(self, *, length: int, batch: int, key_length: int, heads: int | None, multiple: int | None) -> None:
        """Refuse a table that is not of this attention; shorter than the padded sequence is fine, what is beyond is padding.

        `multiple`: of what padding extends a sequence to; None where any number of tokens may be padding.
        """
        rows, own_heads = self.asked.shape[:2]
        if rows not in (1, batch) or (heads is not None and own_heads not in (1, heads)):
            raise SequenceParallelError(
                f"a BlockMask of {rows} rows and {own_heads} heads: must be of 1 or {batch} rows, 1 or {heads} heads"
            )
        for what, made, tokens in (("queries", self.lengths[0], length), ("keys", self.lengths[1], key_length)):
            if not is_whole(made, tokens, multiple):
                raise SequenceParallelError(
                    f"a BlockMask of {made} {what}: must be made for the whole sequence's {tokens} (padding included), or for those of them "
                    "that are no padding, not for a shard of it"
                )

    def covers(self, queries: int, keys: int) -> bool:
        """Return whether it says something of all of so many queries and keys."""
        return self.lengths[0] >= queries and self.lengths[1] >= keys

    def at_positions(self, positions: ScorePositions) -> tuple[Tensor, Tensor]:
        """Return for each key of a tile whether the function decides, and whether it is visible in any case.

        Shapes: () -> (rows or 1, heads or 1, Sq, Sk) twice, bool.
        """
        here = self.inside(positions)
        there = (positions.queries < self.lengths[0])[:, None] & (positions.keys < self.lengths[1])
        rows, columns = (
            (p // size).to(self.asked.device) for p, size in zip((here.queries, here.keys), self.size, strict=True)
        )

        def of_tile(table: Tensor) -> Tensor:
            selected = (
                rows_or_heads_slice(n, part)
                for n, part in zip(table.shape[:2], (positions.rows, positions.heads), strict=True)
            )
            return table[tuple(selected)][:, :, rows[:, None], columns].to(there.device) & there

        return of_tile(self.asked), of_tile(self.whole)

    def inside(self, positions: ScorePositions) -> ScorePositions:
        """Return the positions with those of padding moved to the last token."""
        queries, keys = (
            p.clamp(max=n - 1) for p, n in zip((positions.queries, positions.keys), self.lengths, strict=True)
        )
        return ScorePositions(positions.rows, positions.heads, queries, keys)


def is_whole(made: int, tokens: int, multiple: int | None) -> bool:
    """Return whether what was made for so many tokens is of a whole sequence that padding may have extended."""
    return made <= tokens and (multiple is None or tokens - made < multiple)


def _listed(counts: Tensor, blocks: Tensor, num_keys: int) -> Tensor:
    """Return the listed blocks as a table. Shapes: (rows, heads, n), (rows, heads, n, m) -> (rows, heads, n, num_keys), bool."""
    listed = torch.arange(blocks.shape[3], device=blocks.device) < counts[..., None]
    # What is not listed goes into a column of its own, which is cut off.
    columns = torch.where(listed, blocks, num_keys).to(torch.int64)
    if bool(((columns < 0) | (columns > num_keys)).any()) or bool((listed & (columns == num_keys)).any()):
        raise SequenceParallelError(
            f"a BlockMask lists blocks of keys from {int(blocks[listed].min())} to {int(blocks[listed].max())}: must be from 0 to {num_keys - 1}"
        )
    table = torch.zeros(*blocks.shape[:3], num_keys + 1, dtype=torch.bool, device=blocks.device)
    return table.scatter_(3, columns, True)[..., :num_keys]
