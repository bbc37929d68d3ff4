"""A buffer, a hook or a `forward` that one rank alone has is told, with `preflight=False` too."""

from __future__ import annotations

import pytest

from tests.slow import slow
from tests.step.agreement import rank_alone_ranks as ranks

TWO = dict(ring_size=2)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("an average of its own", "the buffer model.load is (3,) with numbers of hash "),
        *slow((".data", "the buffer model.load is (3,) with numbers of hash ")),
        ("a hook of a weight", "the hooks of model.head.weight is not given on rank 0; Alone.on_train_batch_end.<locals>.<lambda> on rank 1"),
        *slow(("a hook of a module", "the hooks of model.layers.0 is ")),
        ("a forward", "the forward of model.layers.0 is "),
    ],
)  # fmt: skip
def test_what_one_rank_alone_has_is_told(pools, what, said):
    first, second = pools(2).run(_alone, what, TWO, "end")
    assert len(first) == 1, first
    assert "after 2 optimizer steps ranks have other things in the model: " in first[0]
    assert said in first[0]
    assert second == []


@pytest.mark.parametrize("when", ["steps", "checkpoint"])
def test_it_is_told_while_training_and_before_a_checkpoint(pools, when):
    first, _ = pools(2).run(_alone, "a hook of a weight", TWO, when)
    assert len(first) == 1, first
    assert "after 2 optimizer steps " in first[0]


@pytest.mark.parametrize("what", [None, "writes on all", "a cache of another length"])
def test_what_all_have_alike_or_may_have_otherwise_is_not(pools, what):
    assert pools(2).run(_alone, what, TWO, "steps") == [[], []]


@pytest.mark.slow
def test_split_layers_have_parts_and_hooks_of_all(pools):
    assert pools(2).run(_alone, "an average of its own", dict(tensor_parallel_size=2), "end") == [[], []]
    assert len(pools(2).run(_alone, "a hook of a weight", dict(tensor_parallel_size=2), "end")[0]) == 1


def test_data_parallel_ranks_with_whole_sequences_have_rank_0s_buffers(pools):
    whole = dict(data_parallel_size=2, sequence_parallel_size=1)
    assert pools(2).run(_alone, "an average of its own", whole, "end") == [[], []]


def _alone(what, strategy, when):
    return ranks.fit_alone(what, strategy, when=when)
