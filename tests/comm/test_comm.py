"""Collectives: what arrives, and that a fault on one rank becomes the same error on all."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_sp import comm
from lightning_sp.errors import SequenceParallelError
from lightning_sp.testing import run_ranks
from tests.comm.comm_ranks import (
    agreement,
    agreement_calls,
    collectives,
    gathered_dtypes,
    groups_alive,
    half_empty_transfers,
    late_message,
    late_messages,
    of_other_strides,
    same_batch,
    shared_groups,
    summed_loss,
    time_limits,
    turns_apart,
    unequal_cotangents,
    uneven_exchange,
)

FAULT = "the token file ends at byte 12"


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        ([None] * 4, None),
        ([None, None, FAULT, None], f"rank 2: {FAULT}"),
        ([FAULT, None, None, FAULT], f"rank 0, 3: {FAULT}"),
        ([FAULT, None, "other", None], f"rank 0: {FAULT}; rank 2: other"),
        ([FAULT] * 4, FAULT),
    ],
    ids=["none", "one", "two", "different", "all"],
)
def test_a_fault_on_some_ranks_is_the_same_error_on_all(pools, errors, expected):
    for message, elapsed in pools(4).run(agreement, errors):
        assert message == expected
        assert elapsed < 10


def test_agreement_without_a_fault_is_one_all_reduce(pools):
    assert pools(4).run(agreement_calls) == [{"all_reduce": 1}] * 4


def test_without_processes_every_collective_is_the_rank_itself():
    comm.agree(None)
    with pytest.raises(SequenceParallelError, match=FAULT):
        comm.agree(FAULT)
    x = torch.ones(2)
    assert comm.reduce_sum(x) is x
    assert comm.sum_over_ranks(x) is x
    assert comm.gather(x, None) == [x]
    assert comm.gather_objects("x") == ["x"]
    assert comm.all_equal(torch.ones(2, dtype=torch.int64))


def test_plain_collectives(pools):
    ranks = torch.arange(4.0)
    for rank, result in enumerate(pools(4).run(collectives)):
        assert torch.equal(result["gather"], ranks[:, None].expand(4, 2))
        expected = torch.arange(4.0).view(2, 2).t() + ranks.view(4, 1, 1)
        assert torch.equal(result["gather_strided"], expected), "a gather of a transposed tensor keeps its values"
        assert result["gather_objects"] == [{"rank": r} for r in range(4)]
        assert result["gather_long_objects"] == ["x" * 2_000 * r for r in range(4)]
        assert result["broadcast_object"] == "from 1"
        assert result["broadcast"].tolist() == [3.0, 3.0]
        assert result["reduce_sum"].tolist() == [6.0, 6.0]
        assert result["untouched"].tolist() == [rank, rank]
        assert result["all_equal"] == [True, False]
        assert result["names"] == (True, 4, rank)
        assert result["none"] == (None, "", 1, 0)


def test_sums_and_broadcasts_are_of_places_and_not_of_memory(pools):
    """Of ranks whose tensors have other strides."""
    places = torch.arange(6.0).view(2, 3)
    for total, most, sent in pools(2).run(of_other_strides):
        assert torch.equal(total, 2 * places)
        assert torch.equal(most, places)
        assert torch.equal(sent, places)


def test_a_gather_takes_every_dtype(pools):
    names = ["bool", "uint8", "int16", "uint16", "int64", "float16", "bfloat16", "float64", "complex64"]
    for answers in pools(2).run(gathered_dtypes, names):
        for name, (pair, single) in zip(names, answers, strict=True):
            dtype = getattr(torch, name)
            for rank in (0, 1):
                assert torch.equal(pair[rank], torch.full((1, 2), rank, dtype=dtype))
                assert torch.equal(single[rank], torch.tensor(rank, dtype=dtype))


def test_an_uneven_exchange(pools):
    for rank, received in enumerate(pools(4).run(uneven_exchange)):
        assert received.tolist() == [10.0 * source + rank for source in range(4) for _ in range(rank + 1)]


def test_a_transfer_may_be_empty_on_either_side(pools):
    for rank, (received, nothing) in enumerate(pools(4).run(half_empty_transfers)):
        assert received.tolist() == ([] if rank % 2 == 0 else [rank - 1.0] * 3)
        assert nothing.numel() == 0


def test_the_mirror_of_a_sum_adds_up_the_ranks_cotangents(pools):
    total = sum((rank + 1) ** 2 for rank in range(4))
    for rank, (loss, gradient) in enumerate(pools(4).run(summed_loss)):
        assert loss == pytest.approx(math.log(total), abs=1e-12)
        # The sum of the four ranks' equal losses has four times the gradient; FSDP's averaging undoes the factor.
        assert gradient == pytest.approx(4 * 2 * (rank + 1) / total, abs=1e-12)


def test_mirrors_where_ranks_go_on_with_numbers_of_their_own(pools):
    for rank, (parts, of_sum, of_parts) in enumerate(pools(4).run(unequal_cotangents)):
        assert parts == [[index + 1.0, 2.0] for index in range(4)]
        assert of_sum == [1.0 + 2 + 3 + 4] * 2
        assert of_parts == [(rank + 1.0) * (1 + 2 + 3 + 4)] * 2


@pytest.mark.parametrize(
    ("errors", "digests", "passes", "expected"),
    [
        ([None] * 4, [5, 5, 7, 7], [8, 8, 6, 6], None),
        ([None] * 4, [5, 5, 7, 8], [8] * 4, "ranks [[2], [3]] of data-parallel group 1 share one sequence but read different samples"),
        ([None] * 4, [5, 5, 7, 7], [8, 8, 8, 7], "the ranks of data-parallel group 1 have begun [8, 7] passes of ring attention"),
        ([None, FAULT, None, None], [5, 0, 7, 7], [8] * 4, f"rank 1: {FAULT}"),
    ],
    ids=["same", "different", "out of turn", "fault"],
)  # fmt: skip
def test_ranks_of_one_sequence_hold_one_batch(pools, errors, digests, passes, expected):
    for message in pools(4).run(same_batch, errors, digests, [0, 0, 1, 1], passes):
        assert (message is None) == (expected is None)
        assert expected is None or message.startswith(expected)


def test_a_rank_that_validates_where_others_train_is_named_by_that(pools):
    """Its samples differ for that, and not for the loader."""
    stages = ["train", "train", "train", "validate"]
    for message in pools(4).run(same_batch, [None] * 4, [5, 5, 7, 8], [0, 0, 1, 1], [8] * 4, stages):
        assert message.startswith("ranks would go on in other ways: the stage that reads a batch is "), message
        assert "train on rank 0, 1, 2; validate on rank 3: must be the same on all" in message, message


def test_a_fault_of_the_only_rank_is_raised(pools):
    assert pools(1).run(same_batch, [FAULT], [1], [0], [0]) == [FAULT]


def test_every_group_has_the_time_limit_of_the_world():
    """Torch gives a new group 30 minutes, whatever the world has."""
    for limit, limits in run_ranks(time_limits, 4, timeout_s=47.0):
        assert limit == 47.0
        assert limits == [47.0] * 6


def test_fsdp_shares_no_group_with_the_attention(pools):
    """A device mesh of one axis would take the world's, which is the attention's where a sequence is on all ranks: gathers behind hops."""
    degrees, shard_sizes = ((1, 4), (4, 1), (2, 2), (1, 2), (2, 1), (1, 1)), (4, 2, 1)
    assert pools(4).run(shared_groups, degrees, shard_sizes) == [[]] * 4


def test_a_message_of_another_turn_is_never_taken(pools):
    assert pools(4).run(turns_apart) == [((rank - 1) % 4, (rank - 1) % 4, -1.0) for rank in range(4)]


def test_groups_are_made_once_in_a_world_and_end_with_it():
    assert run_ranks(groups_alive, 4) == [([True, True], 0)] * 4


def test_a_message_that_comes_too_late_is_told_from_a_models_error():
    """The preflight would say that the model counts over all tokens."""
    assert run_ranks(late_message, 2) == [[True, False], []]


@pytest.mark.slow
def test_a_message_that_nobody_sends_is_waited_for_as_long_as_the_world_says():
    """In a ring's group and in a mesh's: gloo's messages do not heed what a group's limit is set to later."""
    first, second, third, fourth = run_ranks(late_messages, 4, timeout_s=3)
    assert second == third == []
    for found in (first, fourth):
        assert len(found) == 2
        for seconds, words in found:
            assert "Timed out waiting 3000ms for recv operation to complete" in words
            assert 2.5 < seconds < 20
