"""The benchmarks measure what they say: on a CPU, with small sizes."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import attention_peers
from benchmarks.gpu import attention as attention_gpu
from benchmarks.gpu.attention import Case, EmulatedRank, block_pairs, emulated_ring, whole_forward
from benchmarks.instruments.traffic import fewest_sent_bytes
from lightning_sp.attention import AttentionMask
from lightning_sp.attention.plan.blocks import Block, Kind
from lightning_sp.attention.reference import reference_attention
from lightning_sp.testing import assert_sharded_equals_unsharded

NAMES = ("out", "dq", "dk", "dv")


@pytest.mark.parametrize("ring_size", [1, 2, 4])
@pytest.mark.parametrize("shape", ["4/2/16", "2/2/8"])
def test_the_emulated_ring_is_the_attention(ring_size, shape):
    case = Case(shape, 48, "float64", "cpu")
    q, k, v, grad = case.inputs()
    leaves = [t.detach().requires_grad_(True) for t in (q, k, v)]
    out = reference_attention(*leaves, AttentionMask())
    out.backward(grad)
    with torch.no_grad():
        emulated = emulated_ring(case, ring_size)
    assert_sharded_equals_unsharded(emulated, [out.detach(), *(t.grad for t in leaves)], NAMES)
    assert_sharded_equals_unsharded(emulated[:1], whole_forward(case)[4:5], NAMES[:1])


def test_ranks_of_a_ring_share_the_pairs_and_receive_what_the_ring_says():
    case = Case("4/2/16", 48, "float32", "cpu")
    whole = whole_forward(case)
    ranks = [EmulatedRank(case, 4, rank, whole) for rank in range(4)]
    assert [rank.pairs for rank in ranks] == [48 * 49 // 2 // 4] * 4
    # 12 tokens a rank: both chunks of each later rank, the early one alone of each earlier rank; K and V of 2 heads of 16, 4 bytes.
    token = 2 * 2 * 16 * 4
    assert [rank.received_bytes for rank in ranks] == [(12 * (3 - rank) + 6 * rank) * token for rank in range(4)]


def test_pairs_of_a_block():
    assert block_pairs(Block((2, 6), (0, 5))) == 4 * 5
    assert block_pairs(Block((2, 6), (1, 5), Kind.CAUSAL)) == 1 + 2 + 3 + 4
    assert block_pairs(Block((2, 6), (1, 5), Kind.ANTICAUSAL)) == 4 + 3 + 2 + 1


def test_attention_on_one_device_runs_to_its_file(tmp_path, capsys):
    options = (
        "--device cpu --dtype float32 --lengths 32 64 --shapes 4/2/16 --rings 2 4 --matmul 64 --warmup 1 --repeats 3"
    )
    file = tmp_path / "found.json"
    result = attention_gpu.main([*options.split(), "--json", str(file)])
    assert json.loads(file.read_text()) == result
    assert result["matmul_flops_per_s"] > 0
    rows = result["rows"]
    assert [(row["length"], row["ring_size"]) for row in rows] == [(n, r) for n in (32, 64) for r in (1, 2, 4)]
    # By hand: 32 tokens have 528 causal pairs, 64 have 2,080; 4 heads of 16; 4 and 10 FLOPs each.
    flops = {32: (135_168, 337_920), 64: (532_480, 1_331_200)}
    for row in rows:
        assert (row["forward"]["flops"], row["backward"]["flops"]) == flops[row["length"]]
        for phase in (row["forward"], row["backward"]):
            assert 0 < phase["low_s"] <= phase["median_s"] <= phase["high_s"]
            assert phase["flops_per_s"] == pytest.approx(phase["flops"] / phase["median_s"])
            assert phase["share_of_matmul"] == pytest.approx(phase["flops_per_s"] / result["matmul_flops_per_s"])
        if row["ring_size"] > 1:
            assert row["over_kernel"]["forward"] > 0
            assert row["hidden_from_bytes_per_s"] > 0
        else:
            assert row["merge"]["median_s"] > 0
    printed = capsys.readouterr().out
    assert printed.count("| 4/2/16 |") == len(rows)
    assert "a merge:" in printed


def test_a_length_that_a_ring_does_not_divide_is_refused(capsys):
    with pytest.raises(SystemExit):
        attention_gpu.main(["--device", "cpu", "--lengths", "100", "--rings", "8"])
    assert "--lengths 100 is no multiple of 16" in capsys.readouterr().err


def test_fewest_bytes_of_a_scheme():
    problem = {"length": 4096, "heads": 8, "kv_heads": 8, "dim": 64}
    # In local tensors, of 1,024 tokens x 8 heads x 64 x 4 bytes = 2 MiB: Ulysses 8 (U-1)/U, a zigzag ring 4.5, a consecutive one 3.
    mib = {"4x1": 12, "ulysses": 12, "1x4": 27, "alltoall": 27, "zigzag": 27, "ring-p2p": 18, "distflash": 18}
    # Both: 8 / 2 of them by Ulysses; the ring's unit is 2,048 tokens of 4 heads, as large, 4.5 of them.
    mib["2x2"] = 8 + 9
    for variant, expected in mib.items():
        assert fewest_sent_bytes(attention_peers.scheme(variant, 4), problem, 4) == expected * 2**20, variant
    grouped = problem | {"kv_heads": 2}
    # Each of four Ulysses ranks needs one key-value head: to each other rank 2 + 2 heads of q, k, v and 2 of out, and as many back.
    assert fewest_sent_bytes((4, 1, True), grouped, 4) == 2 * 3 * (2 + 2 + 2) * 1024 * 64 * 4
    assert fewest_sent_bytes((1, 4, True), grouped, 4) == 27 * 2**20 / 4


def test_competitors_are_chosen_by_what_they_and_their_variants_are_called():
    every = attention_peers.chosen([""], [""], 4)
    assert [peer.name for peer in every] == [peer.name for peer in attention_peers.PEERS]
    ours, yunchang = attention_peers.chosen(["lightning_sp", "yunchang"], ["2x2"], 4)
    assert list(ours.variants[4]) == ["2x2", "2x2, network"]
    assert list(yunchang.variants[4]) == ["2x2"]
    assert [peer.name for peer in attention_peers.chosen([""], ["ulysses"], 2)] == [
        "lightning_sp",
        "deepspeed",
        "ringmaster",
    ]
    with pytest.raises(SystemExit, match="no competitor torch has a variant 2x2 on 4 ranks"):
        attention_peers.chosen(["torch"], ["2x2"], 4)
    with pytest.raises(SystemExit, match="no competitor is called megatron: lightning_sp, torch"):
        attention_peers.chosen(["torch", "megatron"], [""], 4)


@pytest.mark.slow
def test_attention_beside_its_peers_measures_this_project():
    (ours,) = (peer for peer in attention_peers.PEERS if peer.name == "lightning_sp")
    problem = {"length": 2048, "heads": 8, "kv_heads": 8, "dim": 64}
    alone, ulysses, ring, network = attention_peers.compare([ours], 2, problem, repeats=1)
    assert [row["name"] for row in (alone, ulysses, ring, network)] == [
        "one process",
        "lightning_sp ulysses",
        "lightning_sp ring",
        "lightning_sp ring, network",
    ]
    assert ring["fewest_mib"] == 0
    tensor = 1024 * 8 * 64 * 4 / 2**20  # MiB of a rank's tokens
    for row in (ulysses, ring, network):
        assert row["error"] < 1e-5
        assert row["fewest_mib"] <= row["sent_mib"] < 1.1 * row["fewest_mib"] + 0.1, row
        assert row["wall_s"] > 0
    # As in test_peak_of_ulysses_is_that_of_the_kernels_backward.
    assert 8 * tensor < ulysses["peak_mib"] < 11 * tensor
    assert alone["fewest_mib"] == 0
