"""Functions of the scores: what they may hold, and what learns."""

from __future__ import annotations

import re

import pytest
import torch

from lightning_sp.attention import (
    AttentionMask,
    ScoreMod,
    sequence_parallel_attention,
)
from lightning_sp.attention.reference import reference_attention
from lightning_sp.attention.spec.score_mod import function_by_number
from lightning_sp.errors import SequenceParallelError
from lightning_sp.testing import assert_sharded_equals_unsharded


def test_a_function_that_holds_what_learns_is_refused():
    slopes = torch.ones(4, requires_grad=True)
    message = re.escape("holds tensors of shapes [(4,)] that require a gradient, which would be lost")
    with pytest.raises(SequenceParallelError, match=message):
        ScoreMod(lambda score, row, head, query, key: score + slopes[head])
    fixed = slopes.detach()
    ScoreMod(lambda score, row, head, query, key: score + fixed[head])


def test_a_function_that_is_gone_is_named():
    number = ScoreMod(lambda score, *_: score).number
    with pytest.raises(SequenceParallelError, match=f"function {number} no longer exists"):
        function_by_number(number)


@pytest.mark.filterwarnings("ignore:torch flash .cpu. computes no score_mod")
def test_a_score_function_may_read_integers_and_only_the_others_learn():
    q, k, v = (torch.randn(1, 2, 12, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    kinds, table = torch.arange(12) % 3, torch.randn(3, dtype=torch.float64, requires_grad=True)
    change = ScoreMod(lambda s, row, head, i, j, kind, held: s + held[kind[i]] * held[kind[j]], kinds, table)
    out = sequence_parallel_attention(q, k, v, mesh=None, mask=AttentionMask(), score_mod=change)
    expected = reference_attention(q, k, v, AttentionMask(), score_mod=change)
    grads = [torch.autograd.grad(each.sin().sum(), (q, k, v, table)) for each in (out, expected)]
    assert_sharded_equals_unsharded(
        [out.detach(), *grads[0]], [expected.detach(), *grads[1]], ["out", "dq", "dk", "dv", "dtable"]
    )
