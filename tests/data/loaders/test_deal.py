"""Batches of a user's own sampler, list or stream are dealt over the data-parallel groups, as one device would have read them."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, SequentialSampler, WeightedRandomSampler

from lightning_sp.data.loaders.coordinates import DataCoordinates
from lightning_sp.data.loaders.deal import RandomStream, deal_indices
from lightning_sp.errors import SequenceParallelError
from tests.data.loaders import deal_ranks as ranks


def coordinates(dp_rank, dp_size):
    return DataCoordinates(dp_rank=dp_rank, dp_size=dp_size, sequence_group=None, control_group=None)


def dealt(loader, dp_size, seed=0, epoch=0):
    """What each group reads, and each group's sampler."""
    found = [deal_indices(loader, coordinates(rank, dp_size), seed) for rank in range(dp_size)]
    for _, sampler in found:
        sampler.set_epoch(epoch)
    return [[batch.tolist() for batch in own] for own, _ in found], [sampler for _, sampler in found]


def test_groups_read_the_rounds_of_one_device():
    loader = DataLoader(range(11), batch_sampler=BatchSampler(SequentialSampler(range(11)), 2, drop_last=False))
    batches, samplers = dealt(loader, 2)
    assert batches == [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [10]]]
    assert [len(sampler) for sampler in samplers] == [3, 3]
    assert samplers[0].rounds == samplers[1].rounds
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10]]


def test_a_round_that_is_not_full_leaves_groups_without_a_batch():
    loader = DataLoader(range(5), batch_sampler=BatchSampler(SequentialSampler(range(5)), 2, drop_last=False))
    assert dealt(loader, 2)[0] == [[[0, 1], [4]], [[2, 3]]]


def test_samples_that_are_batches_are_dealt_by_the_sampler():
    batches, _ = dealt(DataLoader(range(4), batch_size=None, sampler=[3, 1, 0, 2], collate_fn=torch.tensor), 2)
    assert batches == [[3, 0], [1, 2]]


def test_what_a_sampler_draws_is_the_same_on_all_groups_and_in_a_resume():
    loader = DataLoader(range(40), batch_size=2, sampler=WeightedRandomSampler([1.0] * 40, 40))
    first, _ = dealt(loader, 2)
    torch.manual_seed(99)
    torch.rand(7)
    assert dealt(loader, 2)[0] == first
    assert dealt(loader, 2, epoch=1)[0] != first
    assert dealt(loader, 2, seed=5)[0] != first
    merged = [batch for pair in zip(*first, strict=True) for batch in pair]
    assert dealt(loader, 4)[0][2] == merged[2::4]


def test_a_stream_of_random_numbers_leaves_the_process_own():
    def draw():
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    expected = [draw(), draw()]
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    stream, inside = RandomStream(4), []
    outside = [draw()]
    for _ in range(2):
        with stream:
            inside.append(draw())
    assert [*outside, draw()] == expected
    again = RandomStream(4)
    with again:
        assert [draw(), draw()] == inside


class Own(DistributedSampler):
    """Splits in its own way."""


@pytest.mark.parametrize(("replicas", "rank"), [(4, 1), (2, 0)])
def test_a_split_of_another_size_is_refused(replicas, rank):
    loader = DataLoader(range(8), sampler=Own(range(8), num_replicas=replicas, rank=rank))
    with pytest.raises(
        SequenceParallelError, match=rf"split into {replicas} parts.*data_parallel_size=2 parts.*here 1"
    ):
        deal_indices(loader, coordinates(1, 2), 0)


def test_a_split_over_the_groups_stays():
    loader = DataLoader(range(8), sampler=Own(range(8), num_replicas=2, rank=1))
    assert deal_indices(loader, coordinates(1, 2), 0) == (loader, None)


def test_a_dataset_that_hugging_face_split_over_all_ranks_is_refused():
    datasets = pytest.importorskip("datasets")
    from datasets.distributed import split_dataset_by_node

    stream = datasets.IterableDataset.from_generator(lambda: ({"a": i} for i in range(8))).with_format("torch")
    deal_indices(DataLoader(split_dataset_by_node(stream, rank=1, world_size=2)), coordinates(1, 2), 0)
    with pytest.raises(SequenceParallelError, match="split into 4 parts, of which this rank reads part 2"):
        deal_indices(DataLoader(split_dataset_by_node(stream, rank=2, world_size=4)), coordinates(1, 2), 0)


@pytest.mark.parametrize("how", ["weighted", "list", "stream", "split stream"])
def test_every_batch_is_read_by_one_group(pools, how):
    answers = pools(2).run(ranks.read, how)
    for epoch in range(2):
        first, second = (answer["batches"][epoch] for answer in answers)
        assert len(first) == len(second) == 3
        assert not [batch for batch in second[:2] if batch in first[:2]] or how == "weighted"
    if how in ("list", "stream"):
        rows = [[0], [1], [2], [3], [4]] if how == "list" else [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
        assert first == rows[::2]
        # The second group goes on with a batch of nothing that counts.
        assert second == [*rows[1::2], "filler"]
    if how == "split stream":
        assert first == [[0, 2], [4, 6], [8]]
        assert second == [[1, 3], [5, 7], [9]]
    if how != "stream" and how != "split stream":
        assert [answer["length"] for answer in answers] == [3, 3]


def test_what_groups_draw_otherwise_is_refused(pools):
    for answer in pools(2).run(ranks.read, "weighted, seeded by rank"):
        assert "draws other indices on each data-parallel rank (in round 0)" in answer["error"]


def test_a_stream_that_fails_on_one_group_fails_on_all(pools):
    for answer in pools(2).run(ranks.read, "bad stream"):
        assert answer["error"] == "the loader failed: rank 1: ValueError: a bad sample"


def test_a_stream_that_splits_by_the_process_rank_is_said_to_lose_its_other_parts(pools):
    first, other = pools(2).run(ranks.read_in_one_sequence, "split stream")
    assert first["labels"] == other["labels"] == [0, 2, 4, 6, 8]
    assert len(first["said"]) == 1
    for part in (
        "reads Stream and sends its batches to its peers",
        "split_by_node",
        "trainer.strategy.data_parallel_rank",
    ):
        assert part in first["said"][0]


@pytest.mark.parametrize("how", ["stream", "shuffled"])
def test_a_stream_that_is_whole_on_every_rank_is_read_without_a_word(pools, how):
    first, other = pools(2).run(ranks.read_in_one_sequence, how)
    assert sorted(first["labels"]) == list(range(ranks.SAMPLES))
    assert other["labels"] == first["labels"]
    assert not first["said"]
