"""A shard's block mask is looked at as often as it may differ; the reference's FlexAttention is torch's own."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from lightning_sp.data.batch.shard_options import ShardOptions
from lightning_sp.data.batch.sharding import shard_batch
from lightning_sp.layout import SequenceLayout
from lightning_sp.rewrite.flex import _whole_flex_attention, _wrong_block

SLOPES = torch.tensor([0.5, 0.1], dtype=torch.float64)


@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("score_mod", [None, lambda score, b, h, i, j: score + SLOPES[h] * (j - i)])
def test_the_references_is_torchs_own_which_has_no_backward_on_the_cpu(scale, window, score_mod):
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, 2, 19, 8, dtype=torch.float64) for _ in range(3))
    mask = None
    if window is not None:
        mask = create_block_mask(lambda b, h, i, j: (i - j).abs() < window, None, None, 19, 19, device="cpu")
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        expected = flex_attention(q, k, v, score_mod, mask, scale)
    _, whole = shard_batch({"input_ids": torch.zeros(2, 19)}, SequenceLayout(), 0, ShardOptions())
    assert torch.allclose(_whole_flex_attention(whole, q, k, v, score_mod, mask, scale), expected, rtol=0, atol=1e-12)


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
