"""What a user adds up over ranks by torch.distributed: one device's number, or a refusal by name."""

from __future__ import annotations

import itertools

import pytest

from tests.slow import slow
from tests.trainer.processes import collectives_ranks as ranks

WHOLE = dict(sequence_parallel_size=2, global_view=True)


WAYS = ("all_reduce", "by its name", "differentiable", "all_gather", "all_gather_object")
FEW = [(2, "all_reduce"), (2, "by its name"), (2, "differentiable"), (2, "all_gather_object"), (4, "all_gather")]


@pytest.mark.parametrize(
    ("world", "how"), [*FEW, *slow(*(each for each in itertools.product((2, 4), WAYS) if each not in FEW))]
)
def test_what_would_count_the_ranks_of_a_sequence_is_refused_in_the_global_view(pools, world, how):
    said = f"what all {world} ranks have"
    for answer in pools(world).run(ranks.fit, how, world, WHOLE):
        assert said in answer["said"], answer
        assert "the 2 ranks of a sequence hold every number of it alike, so it would count 2 times" in answer["said"]
        assert "collectives_ranks.py" in answer["said"]
        assert f"one of each of the {world // 2} data-parallel groups" in answer["said"]


@pytest.mark.parametrize(
    ("how", "times"),
    [("mean", 1), ("self.all_gather", 2), ("every rank", 4), *slow(("largest", 1), ("data-parallel", 2))],
)
def test_what_says_which_ranks_it_counts_is_theirs(pools, how, times):
    for answer in pools(4).run(ranks.fit, how, 4, WHOLE):
        assert answer["said"] == ""
        assert answer["found"] == times * answer["tokens"]
        assert answer["tokens"] == 2 * 32


@pytest.mark.slow
def test_in_the_view_of_a_part_the_world_adds_up_parts(pools):
    for answer in pools(4).run(ranks.fit, "all_reduce", 4, dict(sequence_parallel_size=2)):
        assert answer["said"] == ""
        assert answer["tokens"] == 32
        assert answer["found"] == 4 * 32
    for answer in pools(2).run(ranks.fit, "all_reduce", 2, dict(sequence_parallel_size=1)):
        assert answer["found"] == 2 * answer["tokens"]


@pytest.mark.parametrize(("how", "times"), [("all_reduce", 0), ("by its name", 0), ("mean", 1), ("data-parallel", 1)])
def test_of_a_batch_without_a_sequence_the_world_has_each_row_twice(pools, how, times):
    for answer in pools(2).run(ranks.fit_pictures, how, 2):
        said = "a batch without a sequence, of which all ranks of a group run all rows: torch.distributed.all_reduce adds up what all 2 ranks"
        assert answer["said"].startswith(said) if times == 0 else not answer["said"], answer
        assert answer["found"] == ([] if times == 0 else [3.0 * times] * 2)
