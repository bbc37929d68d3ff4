import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from lightning_sp.data.samplers.batch_split import BatchSplit
from lightning_sp.data.samplers.evaluation_sampler import EvaluationBatchSampler
from lightning_sp.data.samplers.training_sampler import GlobalBatchSampler, epoch_permutation
from lightning_sp.errors import SequenceParallelError

splits = st.builds(BatchSplit, st.integers(1, 4), st.integers(1, 3), st.integers(1, 4))


def deal(num_samples: int, split: BatchSplit, *, resume: tuple[int, int] | None = None, **options) -> list[list[int]]:
    """Return what each optimizer step sees over all ranks and micro-batches, in the order of places; the last may be short."""
    samplers = [GlobalBatchSampler(num_samples, split, rank, **options) for rank in range(split.dp_size)]
    for sampler in samplers:
        if resume is not None:
            sampler.resume(*resume)
    micro_steps = list(zip(*samplers, strict=True))  # strict: all ranks yield equally many
    a = split.accumulation
    return [
        [index for ranks in micro_steps[step : step + a] for batch in ranks for index in batch]
        for step in range(0, len(micro_steps), a)
    ]


def samples(steps) -> list[list[int]]:
    """Return the steps without their fillers, whose number depends on the split."""
    return [[index for index in step if index >= 0] for step in steps]


@settings(deadline=None)
@given(num_samples=st.integers(1, 60), split=splits, seed=st.integers(0, 5), shuffle=st.booleans())
def test_each_sample_comes_exactly_once_and_fillers_are_marked(num_samples, split, seed, shuffle):
    steps = deal(num_samples, split, seed=seed, shuffle=shuffle)
    assert all(len(step) == split.global_batch_size for step in steps[:-1])
    ranks = [
        list(GlobalBatchSampler(num_samples, split, rank, seed=seed, shuffle=shuffle)) for rank in range(split.dp_size)
    ]
    for micro_step in zip(*ranks, strict=True):
        assert any(i >= 0 for batch in micro_step for i in batch), "a micro step of fillers alone would log a loss of 0"
        assert all(len({i >= 0 for i in batch}) == 1 for batch in micro_step), "a rank has samples or fillers, not both"
    if split.dp_size == 1:
        assert all(i >= 0 for step in steps for i in step), "nobody needs company"
    places = list(itertools.chain(*steps))
    assert sorted(i for i in places if i >= 0) == list(range(num_samples))
    fillers = [i for i in places if i < 0]
    sampler = GlobalBatchSampler(num_samples, split)
    assert len(fillers) == sampler.num_fillers < split.global_batch_size
    assert sum(sampler.num_samples_in(i) for i in range(len(sampler))) == num_samples
    assert all(0 <= ~i < num_samples for i in fillers)
    if not shuffle:
        assert places[:num_samples] == list(range(num_samples))


@settings(deadline=None)
@given(num_samples=st.integers(1, 60), data=st.data(), seed=st.integers(0, 5))
def test_a_step_holds_the_same_samples_in_the_same_places_for_every_split(num_samples, data, seed):
    size = data.draw(st.sampled_from([1, 2, 4, 6, 12]))
    cuts = [(m, a) for m in range(1, size + 1) for a in range(1, size + 1) if size % (m * a) == 0]
    expected = deal(num_samples, BatchSplit(size), seed=seed)
    for m, a in cuts:
        steps = deal(num_samples, BatchSplit(m, a, size // (m * a)), seed=seed)
        assert samples(steps) == samples(expected)
        assert steps[:-1] == expected[:-1]


@settings(deadline=None)
@given(num_samples=st.integers(1, 60), split=splits, epoch=st.integers(0, 3), data=st.data())
def test_a_resume_continues_where_another_split_stopped(num_samples, split, epoch, data):
    sampler = GlobalBatchSampler(num_samples, split)
    sampler.set_epoch(epoch)
    whole = deal(num_samples, split, resume=(0, epoch))
    step = data.draw(st.integers(0, len(whole)))
    batches = min(step * split.accumulation, len(sampler))
    partial = data.draw(st.integers(0, split.accumulation - 1)) if batches + split.accumulation <= len(sampler) else 0
    state = sampler.state_dict(batches + partial)
    assert state["global_samples_consumed"] == step * split.global_batch_size
    other = BatchSplit(split.global_batch_size)
    resumed = GlobalBatchSampler(num_samples, other)
    resumed.load_state_dict(state)
    assert samples(resumed) == samples(whole[step:])
    assert len(resumed) == len(whole)  # the epoch's length for Lightning, whatever is left
    resumed.set_epoch(epoch)
    assert samples(resumed) == samples(whole[step:])
    resumed.set_epoch(epoch + 1)
    assert list(resumed) == deal(num_samples, other, resume=(0, epoch + 1))


@settings(deadline=None)
@given(num_samples=st.integers(1, 60), split=splits)
def test_drop_leaves_out_the_last_places_and_counts_them(num_samples, split):
    if num_samples < split.global_batch_size:
        with pytest.raises(SequenceParallelError, match=f"{num_samples} samples .* {split.global_batch_size}"):
            GlobalBatchSampler(num_samples, split, last="drop")
        return
    whole = deal(num_samples, split)
    dropped = deal(num_samples, split, last="drop")
    assert dropped == whole[: len(dropped)]
    sampler = GlobalBatchSampler(num_samples, split, last="drop")
    assert (sampler.num_dropped, sampler.num_fillers) == (num_samples % split.global_batch_size, 0)


@settings(deadline=None)
@given(num_samples=st.integers(1, 60), split=splits)
def test_drop_micro_leaves_out_less_than_a_micro_batch_over_all_ranks(num_samples, split):
    unit = split.micro_batch_size * split.dp_size
    if num_samples < unit:
        with pytest.raises(SequenceParallelError, match=f"{num_samples} samples .* {unit}"):
            GlobalBatchSampler(num_samples, split, last="drop_micro")
        return
    steps = deal(num_samples, split, last="drop_micro")
    kept = list(itertools.chain(*steps))
    assert kept == list(itertools.chain(*samples(deal(num_samples, split))))[: num_samples // unit * unit]
    sampler = GlobalBatchSampler(num_samples, split, last="drop_micro")
    assert (sampler.num_dropped, sampler.num_fillers) == (num_samples % unit, 0)


def test_the_order_is_the_one_that_checkpoints_were_written_with():
    # Literal numbers: a change of this order would resume old runs on other samples.
    assert epoch_permutation(0, 0, 8).tolist() == PERMUTATION_0_0
    assert epoch_permutation(0, 1, 8).tolist() == PERMUTATION_0_1
    assert sorted(epoch_permutation(3, 2, 1000)) == list(range(1000))
    assert len({tuple(epoch_permutation(seed, epoch, 100)) for seed in range(5) for epoch in range(5)}) == 25


PERMUTATION_0_0 = [3, 2, 1, 6, 0, 7, 4, 5]
PERMUTATION_0_1 = [7, 4, 5, 1, 6, 2, 0, 3]


@settings(deadline=None)
@given(num_samples=st.integers(1, 40), m=st.integers(1, 5), dp_size=st.integers(1, 5))
def test_evaluation_deals_the_batches_of_one_process(num_samples, m, dp_size):
    alone = list(EvaluationBatchSampler(num_samples, m))
    assert [i for batch in alone for i in batch] == list(range(num_samples))
    ranks = [list(EvaluationBatchSampler(num_samples, m, rank, dp_size)) for rank in range(dp_size)]
    assert {len(batches) for batches in ranks} == {-(-len(alone) // dp_size)}
    dealt = [batch for batches in zip(*ranks, strict=True) for batch in batches]
    assert dealt[: len(alone)] == alone
    fillers = dealt[len(alone) :]
    assert len(fillers) == EvaluationBatchSampler(num_samples, m, 0, dp_size).num_filler_batches
    assert all(i < 0 for batch in fillers for i in batch)


def test_seven_samples_on_two_ranks():
    assert list(EvaluationBatchSampler(7, 2, 0, 2)) == [[0, 1], [4, 5]]
    assert list(EvaluationBatchSampler(7, 2, 1, 2)) == [[2, 3], [6]]
    assert list(EvaluationBatchSampler(5, 2, 1, 2)) == [[2, 3], [~4]]


def test_a_sampler_serves_as_batch_sampler_and_as_sampler():
    sampler = GlobalBatchSampler(10, BatchSplit(3), shuffle=False, last="drop")
    expected = [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert [b.tolist() for b in DataLoader(np.arange(10), batch_sampler=sampler)] == expected
    assert [b.tolist() for b in DataLoader(np.arange(10), batch_size=None, sampler=sampler)] == expected


def test_refusals_name_the_numbers():
    with pytest.raises(
        SequenceParallelError, match=r"3 x accumulation 1 x dp 2 = 6 .* is 8: at dp 2 .*\(1, 4\), \(2, 2\)"
    ):
        BatchSplit(3, 1, 2).require(8, origin="global_batch_size")
    with pytest.raises(SequenceParallelError, match=r"8 is not a multiple of dp 3; dp may be one of \[1, 2, 4, 8\]"):
        BatchSplit(1, 1, 3).require(8, origin="global_batch_size")
    with pytest.raises(SequenceParallelError, match="accumulation must be at least 1, got 0"):
        BatchSplit(1, 0)
    with pytest.raises(SequenceParallelError, match=r"dp_rank 2 is not in \[0, 2\)"):
        GlobalBatchSampler(4, BatchSplit(1, 1, 2), 2)
    with pytest.raises(SequenceParallelError, match="at least 1 sample, got 0"):
        EvaluationBatchSampler(0, 1)
    with pytest.raises(SequenceParallelError, match="'pad', 'drop' or 'drop_micro', got 'keep'"):
        GlobalBatchSampler(4, BatchSplit(1), last="keep")
    with pytest.raises(SequenceParallelError, match="seed -1"):
        epoch_permutation(-1, 0, 4)


def test_a_position_of_another_order_is_refused():
    state = GlobalBatchSampler(20, BatchSplit(2, 2), seed=1).state_dict(4)
    for sampler, match in (
        (GlobalBatchSampler(20, BatchSplit(4), seed=2), "seed 1, this run has 2"),
        (GlobalBatchSampler(21, BatchSplit(4), seed=1), "num_samples 20, this run has 21"),
        (GlobalBatchSampler(20, BatchSplit(4), seed=1, shuffle=False), "shuffle True, this run has False"),
        (GlobalBatchSampler(20, BatchSplit(4, 2), seed=1), r"= 8 samples .* is 4: .*\[\(1, 4\), \(2, 2\), \(4, 1\)\]"),
    ):
        with pytest.raises(SequenceParallelError, match=match):
            sampler.load_state_dict(state)
    with pytest.raises(SequenceParallelError, match=r"after 6 samples: .* multiple of the global batch size 4"):
        GlobalBatchSampler(20, BatchSplit(4)).resume(6, 0)
    with pytest.raises(SequenceParallelError, match="at most 20"):
        GlobalBatchSampler(20, BatchSplit(4)).resume(24, 0)
