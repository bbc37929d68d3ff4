"""Bytes that leave each rank are those of the docstrings' formulas, no dense mask or score exists, and nothing is sent twice."""

from __future__ import annotations

import itertools

import pytest
import torch

from benchmarks.instruments.traffic import ring_sent_units, ulysses_sent_elements
from lightning_sp.attention.schemes.head_split import HeadSplit
from lightning_sp.layout import SequenceLayout
from lightning_sp.testing import RankPool
from tests.attention.ranks.operator_ranks import (
    blocks_in_flight,
    failing_mask,
    peak_bytes,
    settled_peak_bytes,
    traffic,
    traffic_of_mask,
)
from tests.slow import slow

LENGTH, DIM, MIB = 64, 8, 2**20


WAYS = {
    "float32": (torch.float32, "network", "hops"),
    "bfloat16": (torch.bfloat16, "network", "hops"),
    "saved": (torch.float32, "network+saved", "hops"),
    "all_gather": (torch.float32, "network", "all_gather"),
    "all_gather saved": (torch.float32, "network+saved", "all_gather"),
}
DEGREES = {"4x1": (4, 1), "1x4": (1, 4), "2x2": (2, 2)}
# Each way, and each degrees.
FEW = [("float32", "4x1"), ("bfloat16", "2x2"), ("saved", "1x4"), ("all_gather", "1x4"), ("all_gather saved", "2x2")]


@pytest.mark.parametrize(
    ("way", "degrees"), [*FEW, *slow(*(each for each in itertools.product(WAYS, DEGREES) if each not in FEW))]
)
def test_bytes_sent_are_the_formulas(pools, way, degrees):
    (dtype, transport, method), (ulysses, ring) = WAYS[way], DEGREES[degrees]
    layout = SequenceLayout(ring, ulysses)
    for (heads, kv_heads), causal in itertools.product([(8, 8), (8, 2), (6, 2), (8, 1)], [True, False]):
        split = HeadSplit(heads, kv_heads, ulysses)
        ranks = pools(4).run(
            traffic, ulysses, ring, heads, kv_heads, LENGTH, DIM, dtype, causal, None, transport, method
        )
        for rank, measured in enumerate(ranks):
            ring_rank, ulysses_rank = layout.coordinates(rank)
            delta = torch.float32.itemsize // dtype.itemsize
            exchanged = ulysses_sent_elements(
                split, ulysses_rank, batch=1, tokens=LENGTH // layout.size, dim=DIM, delta=delta
            )
            units = ring_sent_units(ring, ring_rank, causal=causal, saves_kv=transport == "network+saved")
            local_heads = split.keys(ulysses_rank)[1] - split.keys(ulysses_rank)[0]
            unit = local_heads * (LENGTH // ring) * DIM
            expected = [(e + n * unit) * dtype.itemsize for e, n in zip(exchanged, units, strict=True)]
            assert [sent for sent, _ in measured] == expected, f"{heads}/{kv_heads} causal={causal} rank {rank}"


@pytest.mark.parametrize("degrees", [(4, 1), (1, 4), (2, 2)], ids=["4x1", "1x4", "2x2"])
def test_calls_are_five_all_to_alls_and_three_messages_a_hop(pools, degrees):
    ulysses, ring = degrees
    for forward, backward in pools(4).run(traffic, ulysses, ring, 8, 8, LENGTH, DIM, torch.float32, True):
        exchanges, hops = (2 if ulysses > 1 else 0), ring - 1
        expected = {"all_to_all_single": exchanges, "isend": hops, "irecv": hops}
        assert forward[1] == {name: n for name, n in expected.items() if n}
        # In the backward a number for each token and head besides.
        expected = {"all_to_all_single": 3 if ulysses > 1 else 0, "isend": 2 * hops, "irecv": 2 * hops}
        assert backward[1] == {name: n for name, n in expected.items() if n}


@pytest.mark.parametrize("ring", [2, 4])
def test_every_hop_has_a_block_to_hide_behind(pools, ring):
    """All but the last gradients' way home: nothing is left to compute then."""
    for hops in pools(ring).run(blocks_in_flight, ring, LENGTH):
        assert len(hops) == 3 * (ring - 1)
        assert all(num_blocks >= 1 for num_blocks in hops[:-1]), hops
        assert hops[-1] == 0


def test_documents_that_no_peer_holds_a_part_of_do_not_travel(pools):
    for measured in pools(4).run(traffic, 1, 4, 8, 2, LENGTH, DIM, torch.float32, True, [[LENGTH // 8] * 8]):
        assert measured == [(0, {}), (0, {})]


def test_a_document_over_two_ranks_travels_between_them_alone(pools):
    # Chunks of 8; tokens 4..12 lie on ranks 0 and 1: rank 0 sends their four keys to rank 1, which sends four gradients back.
    lengths = [[4, 8, 4, 8, 8, 8, 8, 8, 8]]
    ranks = pools(4).run(traffic, 1, 4, 2, 2, LENGTH, DIM, torch.float32, True, lengths)
    keys = 2 * 2 * 4 * DIM * 4
    assert [[sent for sent, _ in rank] for rank in ranks] == [[keys, keys], [0, keys], [0, 0], [0, 0]]


@pytest.mark.parametrize("method", ["hops", "all_gather"])
@pytest.mark.parametrize("given", ["matrix", "function", "blocks"])
def test_keys_that_a_matrix_or_a_function_hides_do_not_travel(pools, given, method):
    # Chunks and documents of 8: nobody needs anybody. Of 16: tokens 0..16 lie on ranks 0 and 1, 16..32 on 2 and 3, and so on back.
    found = "all_reduce"
    for forward, backward in pools(4).run(traffic_of_mask, 4, LENGTH, DIM, given, 8, method):
        assert (forward, backward) == ((0, {found: 1}), (0, {})), "only the map that the ranks find together"
    chunk = 2 * 2 * 8 * DIM * 4  # keys and values of 2 heads
    for forward, backward in pools(4).run(traffic_of_mask, 4, LENGTH, DIM, given, 16, method):
        assert forward == (2 * chunk, {found: 1, "isend": 1, "irecv": 1}), "both chunks, to one neighbour"
        assert backward == (4 * chunk, {"isend": 2, "irecv": 2}), "again, and what came back"


def test_a_mask_that_fails_on_some_ranks_fails_on_all_and_leaves_nothing(pools):
    # On some ranks of the ring; on one, whose Ulysses peers are in another ring; with heads that Ulysses gives to half of the ranks.
    for ulysses, ring, fails, failing in ((1, 4, [1, 2], [1, 2]), (2, 2, [0], [0]), (2, 2, 2, [1, 3]), (4, 1, 3, [3])):
        said, errors = zip(*pools(4).run(failing_mask, ulysses, ring, LENGTH, fails), strict=True)
        for rank, each in enumerate(said):
            if rank in failing:
                assert each.startswith(("ZeroDivisionError: of the user's", "IndexError: index")), each
            else:
                assert each.startswith(
                    "SequenceParallelError: the attention's mask_mod or dense mask failed on another rank"
                ), each
                assert "64 queries and 64 keys" in each
        assert max(errors) < 1e-5


# Of one process test_memory.py has twice the length.
@pytest.mark.parametrize(
    ("world", "degrees"),
    [pytest.param(1, (1, 1), id="1x1", marks=pytest.mark.slow), pytest.param(4, (2, 2), id="2x2")],
)
@pytest.mark.parametrize("lengths", [None, [[5000, 1000, 10000, 384]]], ids=["dense", "packed"])
def test_no_dense_scores_or_mask_at_16384_tokens(pools, world, degrees, lengths):
    length = 16384
    # A dense mask would take 256 MiB as bool, the scores 1 GiB; one float32 tensor of one head takes 1 MiB.
    for grown in pools(world).run(peak_bytes, *degrees, length, lengths):
        assert grown < 32 * MIB, f"{grown / MIB:.0f} MiB"


@pytest.mark.slow
def test_peak_of_ulysses_is_that_of_the_kernels_backward():
    # In tensors of this rank's tokens and all heads: what was saved, q, k, v, out (4) and out itself (1), and in the kernel the gradient of out
    # and dq, dk, dv (4). Where the gradients are packed, exchanged and laid there are out and twice three. Else the saved ones would add up: 11.
    heads, length, dim = 16, 1024, 256
    unit = length // 4 * heads * dim * 4
    # Ranks of its own: what earlier calls have left in a rank's heap decides where tensors lie, and whether their memory goes back.
    with RankPool(4, timeout_s=60) as pool:
        every = pool.run(settled_peak_bytes, 4, 1, heads, length, dim)
    for grown in every:
        assert 8.5 * unit < grown < 10 * unit, f"{grown / unit:.1f} tensors"
