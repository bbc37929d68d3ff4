"""The attention as one operator: saved by a checkpoint policy, opaque to torch.compile, refused before any byte moves."""

from __future__ import annotations

import pytest
import torch

from tests.attention.ranks.operator_ranks import (
    block_step,
    contract,
    kept_graph,
    refusals,
    saved_elements,
    short_boundaries,
)


@pytest.mark.parametrize(
    ("degrees", "transport"),
    [
        pytest.param((2, 2), "network", id="2x2-network", marks=pytest.mark.slow),
        pytest.param((2, 2), "shared_memory", id="2x2-shared_memory"),
        pytest.param((4, 1), "network", id="4x1-network"),
        pytest.param((4, 1), "shared_memory", id="4x1-shared_memory", marks=pytest.mark.slow),
    ],
)
def test_selective_checkpointing_repeats_neither_kernel_nor_communication(pools, degrees, transport):
    plain, selective, full = (
        pools(4).run(block_step, *degrees, how, transport) for how in ("plain", "selective", "full")
    )
    for rank in range(4):
        calls, tensors = plain[rank]
        assert selective[rank][0] == calls
        assert calls["all_to_all_single"] == 2 * 5
        assert calls["forward"] == calls["backward"] == 2 * degrees[1]
        # The count would show a repetition: checkpointing that saves nothing runs every forward part again.
        assert full[rank][0]["all_to_all_single"] == 2 * 7
        assert full[rank][0]["forward"] == 2 * calls["forward"]
        for ours, theirs in zip(selective[rank][1], tensors, strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("degrees", "transport"),
    [
        pytest.param((2, 1), "network", id="2x1"),
        pytest.param((1, 2), "network", id="1x2", marks=pytest.mark.slow),
        pytest.param((1, 2), "shared_memory", id="1x2 shared memory"),
    ],
)
def test_compiled_equals_eager(pools, degrees, transport):
    eager, compiled = (pools(2).run(block_step, *degrees, how, transport) for how in ("plain", "compiled"))
    for rank in range(2):
        assert compiled[rank][0] == eager[rank][0]
        for ours, theirs in zip(compiled[rank][1], eager[rank][1], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_stages_are_saved_by_a_checkpoint_and_compile(pools):
    """Two stages of one query head each, which share a key-value head."""
    eager, selective, compiled = (
        pools(2).run(block_step, 2, 1, how, "network", 2) for how in ("plain", "selective", "compiled")
    )
    for rank in range(2):
        assert eager[rank][0]["all_to_all_single"] == 2 * (4 * 2 + 1)
        assert eager[rank][0] == selective[rank][0] == compiled[rank][0]
        for plain, again, ours in zip(eager[rank][1], selective[rank][1], compiled[rank][1], strict=True):
            assert torch.equal(plain, again)
            torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)


# In `make test` one process keeps it (tests/attention/test_operator.py), and ranks compile.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch flash", "ignore:The .grad attribute of a Tensor that is not a leaf Tensor")
@pytest.mark.parametrize("keys", [16, 12], ids=["self", "cross"])
def test_the_operators_keep_their_contract_with_pytorch_on_ranks(pools, keys):
    assert pools(2).run(contract, 2, 1, 4, keys, False) == [None] * 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch flash", "ignore:The .grad attribute of a Tensor that is not a leaf Tensor")
def test_the_operators_keep_their_contract_with_pytorch_on_a_ring_beside_stages(pools):
    assert pools(4).run(contract, 2, 2, 2, 16, True) == [None] * 4


@pytest.mark.parametrize("degrees", [(2, 1), (1, 2)], ids=["2x1", "1x2"])
def test_what_was_saved_stays_while_the_graph_is_kept(pools, degrees):
    for first, second, message in pools(2).run(kept_graph, *degrees):
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        assert "backward through the graph a second time" in message


def test_more_ulysses_ranks_than_heads_are_refused_by_all_before_any_collective(pools):
    for message, calls in pools(4).run(refusals):
        assert message == (
            "ulysses_size=4 exceeds the 3 query heads of this attention: a rank would hold no head; "
            "use ulysses_size in [1, 2] and ring for the rest"
        )
        assert calls == {}


@pytest.mark.parametrize(
    ("heads", "stages", "held", "allowed"), [(8, 4, "2", [1, 2]), (24, 4, "6", [1, 2, 3, 6]), (6, 2, "2 or 1", [1])]
)
def test_stages_that_do_not_divide_a_ranks_heads_are_refused_by_all_before_any_collective(
    pools, heads, stages, held, allowed
):
    for message, calls in pools(4).run(refusals, heads, stages):
        assert message == (
            f"ulysses_stages={stages} with {heads} query heads over ulysses_size=4: every stage has equally many heads on each rank, and a "
            f"rank has {held}; it can be one of {allowed} here"
        )
        assert calls == {}


def test_boundaries_of_the_local_length_are_refused_by_all(pools):
    for message, calls in pools(4).run(short_boundaries):
        assert "boundaries end at 8 tokens, the (padded) sequence has 32: they must be equal" in message
        assert calls == {}


@pytest.mark.parametrize("degrees", [(1, 1), (1, 2), (2, 1)], ids=["1x1", "1x2", "2x1"])
def test_out_is_saved_once(pools, degrees):
    length, heads, kv_heads, dim = 64, 8, 4, 16
    world = degrees[0] * degrees[1]
    token = length // world * dim
    for saved, num_given, is_out in pools(world).run(saved_elements, *degrees, heads, kv_heads, length, dim):
        # q, k and v, as they came or as they were exchanged, out and the log-sum-exp of each query and head.
        assert saved == token * (heads + 2 * kv_heads) + token * heads + length // world * heads
        assert is_out, "what the caller has too"
        assert num_given == (0 if degrees[0] > 1 else 3)
