"""The formulas pair by pair are those for each rank, and what stays on a node does not cross."""

from __future__ import annotations

import itertools

import pytest

from benchmarks.instruments.traffic import ring_sent_units, ulysses_sent_elements
from lightning_sp.attention.schemes.ulysses import HeadSplit
from lightning_sp.layout import SequenceLayout
from tests.cluster.crossing import crossing_elements, crossing_messages, ring_pair_units, ulysses_pair_elements


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_a_rings_pairs_add_up_to_its_ranks(size: int, causal: bool) -> None:
    for rank in range(size):
        pairs = sum(ring_pair_units(rank, to, causal=causal) for to in range(size) if to != rank)
        assert pairs == sum(ring_sent_units(size, rank, causal=causal))


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 2), (6, 2), (8, 1)])
@pytest.mark.parametrize("size", [2, 4])
def test_ulysses_pairs_add_up_to_its_ranks(heads: int, kv_heads: int, size: int) -> None:
    split = HeadSplit(heads, kv_heads, size)
    for rank in range(size):
        pairs = sum(ulysses_pair_elements(split, rank, to, dim=4) for to in range(size) if to != rank)
        assert pairs == sum(ulysses_sent_elements(split, rank, batch=1, tokens=1, dim=4))


def test_only_the_ring_crosses_where_ulysses_fits_a_node() -> None:
    shape = {"heads": 8, "kv_heads": 2, "length": 64, "dim": 16}
    # Two rings of two ranks, one key-value head each: in units of 32 tokens x 16, 4 from ring rank 0 and 5 from ring rank 1.
    layout = SequenceLayout(2, 2)
    assert [crossing_elements(layout, 2, node, causal=True, **shape) for node in (0, 1)] == [2 * 4 * 512, 2 * 5 * 512]
    assert crossing_messages(layout, 2, num_barriers=0) == 2 * 3
    # The same on four nodes of one rank: Ulysses crosses too.
    for node, causal in itertools.product(range(4), (True, False)):
        ring = sum(ring_sent_units(2, node // 2, causal=causal)) * 512
        exchanged = sum(ulysses_sent_elements(HeadSplit(8, 2, 2), node % 2, batch=1, tokens=16, dim=16))
        assert crossing_elements(layout, 1, node, causal=causal, **shape) == ring + exchanged
    assert crossing_messages(layout, 1, num_barriers=1) == 3 + 5 + 2
