"""A shard's block mask is looked at as often as it may differ."""

from __future__ import annotations

import torch
from torch.nn.attention.flex_attention import create_block_mask

from lightning_sp.rewrite.flex import _wrong_block


def test_a_shards_block_mask_is_looked_at_for_each_number_of_heads_and_again_when_it_changes():
    reach = torch.tensor([3, 6])
    made = create_block_mask(
        lambda row, head, i, j: (i - j).abs() < reach[head], None, None, 16, 16, device="cpu", BLOCK_SIZE=4
    )
    one, two = (torch.zeros(1, heads, 16, 8) for heads in (1, 2))
    assert _wrong_block(made, one) is None
    assert "in row 0 and head 1, its blocks otherwise" in _wrong_block(made, two), "lists of head 0"
    reach[1] = 3
    assert _wrong_block(made, two) is None
    reach[0] = 6
    assert "head 0, its blocks otherwise" in _wrong_block(made, one), "its function's tensor was written anew"
    reach[0] = 3
    assert _wrong_block(made, one) is None
    made.kv_num_blocks.zero_()
    assert "the function says visible" in _wrong_block(made, one)
