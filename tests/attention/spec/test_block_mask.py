"""A `BlockMask` is what its lists and its function say, on any tile; where they differ, the lists hold."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from lightning_sp.attention import AttentionMask
from lightning_sp.attention.spec.positions import ScorePositions
from lightning_sp.attention.spec.score_mod import MaskMod
from lightning_sp.errors import SequenceParallelError
from tests.drawn_cases import masks


def by_head(row, head, query, key):
    return (query // (6 + row) == key // (6 + row)) & (query >= key - head)


def all_places(rows, heads, queries, keys):
    return ScorePositions((0, rows), (0, heads), torch.arange(queries), torch.arange(keys))


@pytest.mark.parametrize(("rows", "heads"), [(2, 3), (1, 3), (2, 1), (1, 1)])
@pytest.mark.parametrize(("queries", "keys"), [(32, 32), (29, 29), (30, 21)])
def test_a_block_mask_is_its_function(rows, heads, queries, keys):
    function = by_head if (rows, heads) == (2, 3) else (lambda row, head, i, j: by_head(0, 0, i, j))
    made = create_block_mask(function, rows, heads, queries, keys, device="cpu", BLOCK_SIZE=(4, 8))
    mask = AttentionMask(causal=False, mask_mod=made).mask_mod
    whole = MaskMod(function).visible(all_places(2, 3, queries, keys))
    found = mask.visible(all_places(2, 3, queries + 3, keys + 5))  # with padding
    assert torch.equal(found[:, :, :queries, :keys].expand_as(whole), whole)
    assert not bool(found[:, :, queries:].any())
    assert not bool(found[..., keys:].any())
    part = ScorePositions((1, 2), (1, 3), torch.tensor([5, 6, 17]), torch.tensor([0, 9, 8, 20]))
    assert torch.equal(mask.visible(part).expand(1, 2, 3, 4), whole[1:, 1:, part.queries[:, None], part.keys])


def test_where_they_differ_the_lists_hold():
    made = masks.chosen_blocks(32, 27)
    found = AttentionMask(causal=False, mask_mod=made).mask_mod.visible(all_places(1, 1, 32, 27))[0, 0]
    function = MaskMod(masks.MASK_MODS["every third"]).visible(all_places(1, 1, 32, 27))[0, 0]
    expected = torch.zeros(32, 27, dtype=torch.bool)
    for i in range(7):
        for j in made.kv_indices[0, 0, i, : made.kv_num_blocks[0, 0, i]].tolist():
            place = (slice(5 * i, 5 * i + 5), slice(5 * j, 5 * j + 5))
            expected[place] = function[place]
        for j in made.full_kv_indices[0, 0, i, : made.full_kv_num_blocks[0, 0, i]].tolist():
            expected[5 * i : 5 * i + 5, 5 * j : 5 * j + 5] = True
    assert torch.equal(found, expected)
    assert bool((found & ~function).any())
    assert bool((function & ~found).any())
    assert not bool(found[5:10].any())


def test_blocks_without_a_function_are_the_mask():
    made = create_block_mask(by_head, 1, 1, 32, 32, device="cpu", BLOCK_SIZE=8)
    lists = (made.kv_num_blocks, made.kv_indices, made.full_kv_num_blocks, made.full_kv_indices)
    for given in (lists, (lists[0], lists[1], None, None)):
        alone = BlockMask.from_kv_blocks(*given, BLOCK_SIZE=8, seq_lengths=(32, 32))
        found = AttentionMask(causal=False, mask_mod=alone).mask_mod.visible(all_places(1, 1, 32, 32))[0, 0]
        assert torch.equal(found, alone.to_dense()[0, 0].bool().repeat_interleave(8, 0).repeat_interleave(8, 1))


def made_for(length, rows=1, heads=1):
    return create_block_mask(by_head, rows, heads, length, length, device="cpu", BLOCK_SIZE=8)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: made_for(32, 3), "BlockMask of 3 rows and 1 heads: must be of 1 or 2 rows, 1 or 4 heads"),
        (lambda: made_for(32, 1, 3), "BlockMask of 1 rows and 3 heads"),
        (lambda: made_for(40), "BlockMask of 40 queries: must be made for the whole sequence's 32"),
        (
            lambda: made_for(16),
            "BlockMask of 16 queries: must be made for the whole sequence's 32 .*, not for a shard of it",
        ),
        (lambda: made_for(28), "BlockMask of 28 queries"),
    ],
)
def test_a_block_mask_of_another_attention_is_refused(made, said):
    with pytest.raises(SequenceParallelError, match=said):
        AttentionMask(causal=False, mask_mod=made()).check(length=32, batch=2, heads=4, multiple=4)
    AttentionMask(mask_mod=made_for(29, 2, 4)).check(length=32, batch=2, heads=4, multiple=4)


def test_lists_of_another_form_are_refused():
    made = made_for(32)
    part = made[:, :, 1:3]
    part.mask_mod = by_head
    flat = BlockMask.from_kv_blocks(made.kv_num_blocks[0], made.kv_indices[0], BLOCK_SIZE=8, mask_mod=by_head)
    for wrong in (part, flat):
        with pytest.raises(
            SequenceParallelError, match=r"BlockMask of 32 queries and 32 keys in blocks of .* with lists of shapes"
        ):
            AttentionMask(causal=False, mask_mod=wrong)
    made.kv_indices[0, 0, 1, 0], made.kv_num_blocks[:] = 7, 2
    with pytest.raises(SequenceParallelError, match="lists blocks of keys from 0 to 7: must be from 0 to 3"):
        AttentionMask(causal=False, mask_mod=made)


def test_a_function_is_not_asked_beyond_its_own_tokens():
    ids = torch.arange(29) // 9
    made = create_block_mask(lambda row, head, i, j: ids[i] == ids[j], None, None, 29, 29, device="cpu", BLOCK_SIZE=8)
    found = AttentionMask(causal=False, mask_mod=made).mask_mod.visible(all_places(1, 1, 32, 32))[0, 0]
    assert torch.equal(found[:29, :29], ids[:, None] == ids)
    assert not bool(found[29:].any())
