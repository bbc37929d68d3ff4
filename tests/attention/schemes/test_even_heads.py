"""Heads that all ranks have in equal steps are copied at once: the same numbers as copied rank by rank, for every split of few heads."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from lightning_sp.attention.schemes import ulysses
from lightning_sp.attention.schemes.even_heads import even_heads
from lightning_sp.attention.schemes.head_split import HeadSplit

BATCH, TOKENS, DIM = 2, 3, 4


def _splits() -> list[HeadSplit]:
    """Return those of all heads and of each stage."""
    whole = [
        HeadSplit(heads, kv_heads, size, stages)
        for heads, kv_heads, size, stages in product((2, 4, 6, 8, 12), (1, 2, 3, 4, 8), (2, 3, 4, 8), (1, 2))
        if heads % kv_heads == 0
        and size <= heads
        and (stages == 1 or (heads % size == 0 and heads // size % stages == 0))
    ]
    return [each for split in whole for each in ([split] if split.num_stages == 1 else split.each_stage())]


def _heads(split: HeadSplit) -> list[tuple[tuple[int, int], ...]]:
    return [split.all_queries(), split.all_travelling(), split.all_travelling()]


def _zeros(split: HeadSplit) -> list[Tensor]:
    """Return where q, k and v go, as they lie in memory: token by token."""
    return [
        torch.zeros(BATCH, TOKENS, heads, DIM, dtype=torch.float64).transpose(1, 2)
        for heads in (split.num_heads, split.num_kv_heads, split.num_kv_heads)
    ]


@pytest.mark.parametrize("split", _splits(), ids=str)
def test_one_copy_moves_what_a_copy_for_each_rank_does(split: HeadSplit, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(each.shape, generator=generator, dtype=torch.float64) for each in _zeros(split)]
    packed, counts = ulysses._pack(tensors, _heads(split))
    laid = _zeros(split)
    ulysses._lay(packed, _heads(split), laid)
    monkeypatch.setattr(ulysses, "even_heads", lambda *_: None)
    packed_by_rank, counts_by_rank = ulysses._pack(tensors, _heads(split))
    laid_by_rank = _zeros(split)
    ulysses._lay(packed_by_rank, _heads(split), laid_by_rank)
    assert counts == counts_by_rank
    assert torch.equal(packed, packed_by_rank)
    for at_once, by_rank in zip(laid, laid_by_rank, strict=True):
        # Up to eight equal shares are added up, in another order.
        torch.testing.assert_close(at_once, by_rank, rtol=1e-15, atol=0)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "size"), [(8, 8, 4), (8, 2, 4), (8, 1, 8), (32, 8, 8), (6, 3, 3)]
)
def test_usual_heads_are_even(num_heads: int, num_kv_heads: int, size: int) -> None:
    split = HeadSplit(num_heads, num_kv_heads, size)
    assert even_heads(split.all_queries(), num_heads)
    assert even_heads(split.all_travelling(), num_kv_heads)


def test_ranks_with_more_heads_than_others_are_not() -> None:
    assert even_heads(HeadSplit(6, 6, 4).all_queries(), 6) is None
    # Heads 0 and 1, 0 and 1, 1 and 2: no equal steps.
    assert even_heads(((0, 2), (0, 2), (1, 3)), 3) is None
