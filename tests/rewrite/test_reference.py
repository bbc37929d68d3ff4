"""The reference's FlexAttention is torch's own, which has no backward on the CPU."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from lightning_sp.attention.spec.block_mask import BlockTable
from lightning_sp.attention.spec.score_mod import MaskMod
from lightning_sp.rewrite.closures import learned_score_mod
from lightning_sp.rewrite.reference import whole_attention, whole_positions

SLOPES = torch.tensor([0.5, 0.1], dtype=torch.float64)


@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("score_mod", [None, lambda score, b, h, i, j: score + SLOPES[h] * (j - i)])
def test_it_is_torchs_own(scale, window, score_mod):
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, 2, 19, 8, dtype=torch.float64) for _ in range(3))
    mask = visible = None
    if window is not None:
        mask = create_block_mask(lambda b, h, i, j: (i - j).abs() < window, None, None, 19, 19, device="cpu")
        visible = MaskMod(mask.mask_mod, BlockTable.of(mask)).visible(whole_positions(q, k))
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        expected = flex_attention(q, k, v, score_mod, mask, scale)
    learned = None if score_mod is None else learned_score_mod(score_mod, q)
    found = whole_attention(q, k, v, visible, scale=scale, score_mod=learned)
    assert torch.allclose(found, expected, rtol=0, atol=1e-12)
