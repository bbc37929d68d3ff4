"""ALiBi's slopes and T5's buckets."""

from __future__ import annotations

import pytest
import torch

from lightning_sp.attention import (
    alibi_slopes,
)
from lightning_sp.attention.spec.position_bias import t5_bucket


@pytest.mark.parametrize("heads", [8, 12])
def test_alibi_has_the_slopes_of_its_paper(heads):
    slopes = alibi_slopes(heads)
    assert slopes[:8].tolist() == [2.0 ** -(i + 1) for i in range(8)]
    assert slopes[8:].tolist() == pytest.approx([2.0 ** -(i + 0.5) for i in range(heads - 8)])


@pytest.mark.parametrize("bidirectional", [True, False])
def test_buckets_are_those_of_t5(bidirectional):
    from transformers.models.t5.modeling_t5 import T5Attention

    distances = torch.arange(-300, 300)
    theirs = T5Attention._relative_position_bucket(distances, bidirectional, 32, 128)
    assert torch.equal(t5_bucket(distances, 32, bidirectional=bidirectional, max_distance=128), theirs)
