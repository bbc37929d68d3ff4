"""The ring through shared memory: bit-equal to the network, signals alone travel, nothing is left behind, and what cannot be is refused."""

from __future__ import annotations

import pytest
import torch

from benchmarks.traffic import ulysses_sent_elements
from lightning_sp.attention.ulysses import HeadSplit
from lightning_sp.layout import SequenceLayout
from tests.dist.operator_ranks import local_results, traffic

DEGREES = pytest.mark.parametrize("degrees", [(1, 4), (2, 2)], ids=["1x4", "2x2"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)


@DEGREES
@DTYPES
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_bit_equal_to_the_network(pools, degrees, dtype, causal):
    # Growing, shrinking and growing again: an arena is that of the longest so far.
    for seed, length in enumerate((32, 64, 16, 128)):
        case = (*degrees, 6, 2, length, 8, dtype, seed, causal)
        ours, theirs = (pools(4).run(local_results, *case, transport) for transport in ("shared_memory", "network"))
        for rank in range(4):
            for mine, other in zip(ours[rank], theirs[rank], strict=True):
                assert torch.equal(mine, other)


@DEGREES
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_signals_alone_travel_between_the_ranks_of_a_ring(pools, degrees, causal):
    ulysses, ring = degrees
    layout, split, heads, length, dim = SequenceLayout(ring, ulysses), HeadSplit(8, 8, ulysses), 8, 64, 8
    ranks = pools(4).run(traffic, *degrees, heads, heads, length, dim, torch.float32, causal, None, "shared_memory")
    for rank, measured in enumerate(ranks):
        _, place = layout.coordinates(rank)
        exchanged = ulysses_sent_elements(split, place, batch=1, tokens=length // layout.size, dim=dim)
        # Ready and done in a forward; home and added beside them in a backward.
        for elements, signals, (sent, calls) in zip(exchanged, (2, 4), measured, strict=True):
            assert sent == elements * 4 + signals * (ring - 1)
            exchanges = {"all_to_all_single": 2} if ulysses > 1 else {}
            assert calls == {"isend": signals * (ring - 1), "irecv": signals * (ring - 1), **exchanges}


def test_documents_that_no_peer_holds_a_part_of_need_no_signal(pools):
    for measured in pools(4).run(traffic, 1, 4, 8, 2, 64, 8, torch.float32, True, [[8] * 8], "shared_memory"):
        assert measured == [(0, {}), (0, {})]
