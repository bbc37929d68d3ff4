"""The dropout of the attention: which scores it drops."""

from __future__ import annotations

import pytest
import torch

from lightning_sp.attention import (
    AttentionDropout,
    AttentionMask,
    sequence_parallel_attention,
)
from lightning_sp.attention.spec.positions import ScorePositions
from lightning_sp.errors import SequenceParallelError
from tests.attention.tensors import tensors


@pytest.mark.parametrize("probability", [-0.1, 1.0])
def test_a_dropout_that_is_no_probability_is_refused(probability):
    with pytest.raises(SequenceParallelError, match=f"dropout probability {probability}: must be at least 0 and below"):
        AttentionDropout(probability)


@pytest.mark.filterwarnings("ignore:torch flash")
def test_a_dropout_takes_any_seed_of_torch_and_no_longer_one():
    everywhere = ScorePositions((0, 1), (0, 2), torch.arange(8), torch.arange(8))
    largest = AttentionDropout(0.3, seed=2**64 - 1)
    assert torch.equal(largest.keep(everywhere), AttentionDropout(0.3, seed=-1).keep(everywhere))
    q, k, v = tensors((1, 2, 8, 8), (1, 2, 8, 8), (1, 2, 8, 8))
    sequence_parallel_attention(q, k, v, mesh=None, mask=AttentionMask(), dropout=largest)
    for name in ("seed", "call"):
        with pytest.raises(SequenceParallelError, match=f"dropout {name} {2**64}: must have at most 64 bits"):
            AttentionDropout(0.3, **{name: 2**64})


def test_dropout_keeps_its_share_and_no_two_of_its_masks_agree():
    everywhere = ScorePositions((0, 2), (0, 3), torch.arange(64), torch.arange(80))
    one = AttentionDropout(0.3, seed=1, call=2).keep(everywhere)
    masks = [one[0, 0], one[1, 0], one[0, 1], one[0, 0].roll(1, 0), one[0, 0].roll(1, 1)]
    others = ((1, 3), (2, 2), (2, 1), (-1, 2))
    masks += [AttentionDropout(0.3, seed, call).keep(everywhere)[0, 0] for seed, call in others]
    for i, a in enumerate(masks):
        assert abs(float(a.double().mean()) - 0.7) < 0.03
        for b in masks[:i]:
            # Two independent masks agree where both keep or both drop: 0.58 of 5,120 places, standard deviation 0.007.
            assert abs(float((a == b).double().mean()) - 0.58) < 0.04
    part = everywhere.part(row=1, queries=slice(5, 9), keys=slice(7, 20)).of_heads((1, 3))
    assert torch.equal(AttentionDropout(0.3, 1, 2).keep(part), one[1:2, 1:3, 5:9, 7:20])


def test_dropout_numbers_samples_and_not_rows():
    places = ScorePositions((0, 2), (0, 1), torch.arange(30), torch.arange(30))
    both = AttentionDropout(0.5, 1, samples=torch.tensor([7, 3])).keep(places)
    other = AttentionDropout(0.5, 1, samples=torch.tensor([3, 9])).keep(places)
    assert torch.equal(both[1], other[0])
    assert not torch.equal(both[0], other[1])
