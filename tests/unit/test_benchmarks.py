"""The benchmarks measure what they say: on a CPU, with small sizes."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import attention_gpu
from benchmarks.attention_gpu import Case, EmulatedRank, block_pairs, emulated_ring, whole_forward
from lightning_sp.attention import AttentionMask
from lightning_sp.attention.plan import Block, Kind
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
