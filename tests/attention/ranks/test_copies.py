"""How often Ulysses copies: once to pack what is sent, once to lay what came home side by side, and of that nothing is cast.

Where all ranks have as many heads, one copy moves those of all of them, so that a GPU starts one kernel, not one for each rank.
"""

from __future__ import annotations

import pytest
import torch

from lightning_sp.attention.schemes.head_split import HeadSplit
from tests.attention.ranks.copies_ranks import copies

LENGTH, DIM = 64, 16


def moved(part):
    return sum(elements for _, elements, _ in part)


def without_casts(part):
    casts = [each for each in part if len(set(each[2])) > 1]
    return [each for each in part if each not in casts], casts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("heads", [(8, 8), (8, 4), (8, 2), (8, 1), (6, 6)], ids=str)
def test_every_exchange_has_one_copy_before_and_at_most_one_after(pools, heads, batch, dtype):
    size = 4
    num_heads, num_kv_heads = heads
    split = HeadSplit(num_heads, num_kv_heads, size)
    token = batch * DIM  # elements of one head of one token
    s = LENGTH // size
    # Heads that travel for each token of a rank: each query head to one rank, each key-value head to every rank that
    # needs it. The same come home.
    travelling = sum(split.width(u) for u in range(size))
    is_even, is_shared = num_heads % size == 0, num_kv_heads < size
    calls = 1 if is_even else size
    for rank, (forward, backward) in enumerate(pools(size).run(copies, size, 1, *heads, batch, LENGTH, DIM, dtype)):
        h = split.queries(rank)[1] - split.queries(rank)[0]
        lse = batch * h * LENGTH  # the CPU kernel's lies (B, S, h) in memory, the operator returns (B, h, S)
        before, between, after = forward
        assert moved(before) == s * token * travelling
        assert len(before) == 3 * calls  # q, k and v
        # The CPU kernel lays out as q lies, which is as it is sent.
        assert between == []
        # Each head of this rank's tokens, from the rank that computed it. What is saved is what was sent.
        assert moved(after) == s * token * num_heads + (lse if h > 1 else 0)
        assert len(after) == calls + (h > 1)

        of_delta, before, between, after = backward
        # A number for each head of each token. What makes it, and what comes of it, is computed in the accumulator's dtype.
        of_delta, casts = without_casts(of_delta)
        assert moved(of_delta) == s * batch * num_heads
        between, casts_between = without_casts(between)
        if dtype == torch.bfloat16:
            assert moved(casts) == 2 * s * token * num_heads
            assert moved(casts_between) == 2 * LENGTH * token * h + LENGTH * batch * h
        else:
            assert casts == casts_between == []
        assert moved(before) == s * token * num_heads
        assert len(before) == calls
        assert moved(between) == LENGTH * token * split.width(rank)
        assert len(between) == 1
        # A head that one rank used is copied to its place; shares of one head are summed from where they came.
        assert moved(after) == s * token * (num_heads if is_shared else travelling)
        assert len(after) == calls * (1 if is_shared else 3)
        for part in (*forward, before, between, after):
            assert all(len(set(dtypes)) == 1 for _, _, dtypes in part), f"rank {rank} casts: {part}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch", [1, 2])
def test_one_rank_copies_nothing_but_the_log_sum_exp(pools, batch, dtype):
    ((forward, backward),) = pools(1).run(copies, 1, 1, 8, 2, batch, LENGTH, DIM, dtype)
    assert [[elements for _, elements, _ in part] for part in forward] == [[batch * 8 * LENGTH]]
    assert backward == [[]]
