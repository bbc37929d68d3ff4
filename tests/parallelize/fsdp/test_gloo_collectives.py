"""FSDP2 on gloo: the direct collectives against torch's own, and gradients through them against one process."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist

from tests.parallelize.fsdp.gloo_collectives_ranks import (
    absent_rank,
    ahead_of_time,
    differences,
    divided,
    gathers,
    law,
    other_backend,
    premultiplied,
    reductions,
    refused,
    traffic,
)
from tests.slow import slow

DTYPES = [torch.float64, torch.float32, torch.bfloat16]
SIZES = [0, 1, 7, 1000, 200_003]


GATHERS = [
    (torch.float64, "sync", 2),
    (torch.float32, "async", 4),
    (torch.bfloat16, "async", 2),
    (torch.uint8, "sync", 4),
]
REDUCTIONS = [
    (torch.float64, "async", "avg", 4),
    (torch.float32, "sync", "avg", 2),
    (torch.bfloat16, "async", "sum", 2),
    (torch.bfloat16, "sync", "sum", 4),
]


def others_slow(few, *axes):
    """Return a few cases, each value of all axes among them, and the rest of the product for the slow tests."""
    return [*few, *slow(*(each for each in itertools.product(*axes) if each not in few))]


@pytest.mark.parametrize(
    ("dtype", "when", "world"),
    others_slow(GATHERS, [*DTYPES, torch.uint8], ("sync", "async"), (2, 4)),
    ids=str,
)
def test_a_gather_is_the_default_one(pools, dtype, when, world):
    for n in SIZES[1:]:
        for inside, outside, default in pools(world).run(gathers, n, dtype, when == "async"):
            assert torch.equal(inside, default)
            assert torch.equal(outside, default)


@pytest.mark.parametrize(
    ("dtype", "when", "operation", "world"),
    others_slow(REDUCTIONS, DTYPES, ("sync", "async"), ("sum", "avg"), (2, 4)),
    ids=str,
)
def test_a_reduction_of_whole_numbers_is_the_default_one(pools, dtype, when, operation, world):
    for n in SIZES[1:]:
        for output, default, _, kept in pools(world).run(reductions, n, dtype, operation, when == "async", True):
            assert torch.equal(output, default)
            assert kept, "the input belongs to FSDP2"


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("operation", ["sum", "avg"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_sum_runs_in_rank_order_and_is_rounded_once(pools, world, dtype, operation):
    wide = torch.promote_types(dtype, torch.float32)
    for output, default, parts, _ in pools(world).run(reductions, 1000, dtype, operation, False, False):
        expected = parts[0].to(wide)
        for part in parts[1:]:
            expected = expected + part.to(wide)
        expected = expected / world if operation == "avg" else expected
        assert torch.equal(output, expected.to(dtype))
        if dtype == torch.float64:
            assert torch.allclose(output, default, rtol=0, atol=1e-14)


def test_nothing_to_move_is_no_message(pools):
    for inside, outside, _ in pools(2).run(gathers, 0, torch.float32, True):
        assert inside.numel() == outside.numel() == 0


@pytest.mark.parametrize(
    ("accumulate", "shape"),
    others_slow(
        [(1, (2, 2)), (3, (4,)), (1, (1, 2)), (3, (2, 1))],
        (1, 3),
        [(2,), (1, 2), (2, 1), (4,), (2, 2), (4, 1)],
    ),
    ids=str,
)
def test_gradients_are_one_process(pools, accumulate, shape):
    world = shape[0] * shape[-1] if len(shape) == 2 else shape[0]
    for worst, names in pools(world).run(law, shape, accumulate):
        assert worst <= 1e-10
        assert len(names) == 2 + 3 * 4, "all but the unused ones have a gradient"


@pytest.mark.parametrize(("shape", "reduce_dtype"), [((2,), torch.float32), ((2, 2), torch.float32), ((2,), None)], ids=str)  # fmt: skip
def test_mixed_precision_is_bit_equal_where_two_are_summed(pools, shape, reduce_dtype):
    # The order of two does not matter; torch reduces in bfloat16 where no reduce dtype is given, and rounds once too.
    assert pools(2 * len(shape)).run(differences, shape, torch.bfloat16, reduce_dtype) == [0.0] * 2 * len(shape)


@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=str)
def test_a_divide_factor_is_obeyed(pools, shape):
    assert pools(2 * len(shape)).run(divided, shape) == [0.0] * 2 * len(shape)


def test_a_factor_that_gloo_cannot_apply_is_refused_with_the_way_out(pools):
    for message in pools(2).run(premultiplied):
        assert message is not None
        assert "over 2 ranks by" in message
        assert "set_force_sum_reduction_for_comms(True)" in message
    assert "over 4 ranks by RedOpType.MAX" in pools(4).run(refused, dist.ReduceOp.MAX)[3]


def test_a_gather_ahead_of_time_is_waited_for(pools):
    assert pools(2).run(ahead_of_time, 4_000_000) == [True, True]


@pytest.mark.parametrize("shape", [(2,), (4,), (2, 2)], ids=str)
def test_shard_model_applies_them(pools, shape):
    world = 4 if sum(shape) > 2 else 2
    for sent_bytes, expected, calls in pools(world).run(_applied, shape):
        assert sent_bytes == expected
        # One all_reduce agrees on what was used. Replicas of a shard are summed by FSDP2 itself.
        assert calls.pop("all_reduce") == (1 if len(shape) == 1 else 5)
        assert set(calls) == {"isend", "irecv"}
    for sent_bytes, _, calls in pools(world).run(_left_alone, shape):
        assert sent_bytes == calls.get("isend", 0) == 0, "the test would not see the difference"
        assert any(name.startswith("all_gather") for name in calls)
        assert any(name.startswith("reduce_scatter") for name in calls)


def _applied(shape):
    return traffic(shape, through_shard_model=True)


def _left_alone(shape):
    return traffic(shape, through_shard_model=False)


def test_another_backend_keeps_its_own(pools):
    assert pools(2).run(other_backend) == [(False, True, 0)] * 2


def test_a_rank_that_does_not_come_is_a_timeout(pools):
    (message, elapsed), _ = pools(2).run(absent_rank)
    assert message is not None
    assert "Timed out" in message or "timeout" in message.lower()
    assert elapsed < 20
