"""Which way "auto" takes the keys of a ring: what was measured, and never another where a way is named."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lightning_sp.attention import AttentionMask, boundaries_from_lengths
from lightning_sp.attention.plan.blocks import key_ranges, plan_of
from lightning_sp.attention.schemes.ring import Ring
from lightning_sp.attention.schemes.ring_method import uses_all_gather
from lightning_sp.config import AttentionOptions
from lightning_sp.layout import SequenceLayout


def ring_of(size, length, mask=None, rank=0):
    return Ring(plan_of(mask or AttentionMask(), SequenceLayout(size, 1), length, 1), rank, None)


def decides(method, ring, device="cpu"):
    ring = replace(ring, options=AttentionOptions(ring_method=method))
    return uses_all_gather(ring, token_bytes=2 * 8 * 64 * 4, device_type=device)


# docs/log/ring.md, "Hops or all at once": of these all at once was the cheaper one in 8 ranks at 64 tokens alone.
@pytest.mark.parametrize(
    ("size", "length", "expected"), [(8, 64, True), (8, 2048, False), (4, 512, False), (4, 2048, False)]
)
def test_auto_takes_what_was_measured_to_be_cheaper(size, length, expected):
    for rank in range(size):
        assert decides("auto", ring_of(size, length, rank=rank)) is expected


def test_a_way_that_is_named_is_taken():
    for length in (64, 2048):
        assert decides("all_gather", ring_of(8, length))
        assert not decides("hops", ring_of(8, length))


def test_one_rank_gathers_nothing_and_what_was_never_measured_hops():
    assert not decides("all_gather", ring_of(1, 64))
    assert not decides("auto", ring_of(8, 64), "meta")


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    "mask",
    [
        AttentionMask(),
        AttentionMask(causal=False),
        AttentionMask(window_size=(9, None)),
        AttentionMask(boundaries=boundaries_from_lengths([[5, 20, 3, 36]])),
        AttentionMask(valid=torch.tensor([[7, 50]])),
    ],
    ids=["causal", "full", "window", "packed", "padded"],
)
def test_at_once_come_the_keys_that_come_in_hops(size, mask):
    """Part by part, in the order in which they arrive, each to a place of its own."""
    for rank in range(size):
        ring = ring_of(size, 64, mask, rank)
        places = []
        for source, parts in enumerate(ring.all_gather.parts):
            arriving = [i for held in key_ranges(ring.plan.blocks(rank, source)) for i in range(*held)]
            assert [i for held, _ in parts for i in range(*held)] == arriving
            places += [i for _, place in parts for i in range(*place)]
        assert sorted(places) == list(range(ring.all_gather.num_keys))
