"""A branch on a length that no crop reaches: seen by shapes, and exact in the global view."""

from __future__ import annotations

import functools
import os
import sys
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_sp.preflight.batches.batches_to_try import BatchesToTry
from lightning_sp.preflight.lengths.by_shapes import calls_by_shapes
from tests.preflight.lengths import untried_length_ranks as ranks
from tests.slow import slow

RING, ULYSSES = dict(ring_size=2), dict(ulysses_size=2)


def assert_same(found, plain):
    assert found["losses"] == pytest.approx(plain["losses"], rel=1e-10)
    for name, weight in plain["weights"].items():
        assert (found["weights"][name] - weight).abs().max() <= 1e-10, name


@pytest.mark.parametrize(
    ("degrees", "less"),
    [pytest.param(RING, True, id="ring-below"), *slow((RING, False), (ULYSSES, False), (ULYSSES, True))],
)
def test_a_step_that_branches_beyond_the_crops_goes_on_in_the_global_view(pools, degrees, less):
    [plain] = pools(1).run(ranks.fit, 1, None, 200, 1, less)
    for found in pools(2).run(ranks.fit, 2, degrees, 200, 1, less):
        assert found["whole"]
        assert_same(found, plain)


def test_a_step_whose_numbers_are_chosen_by_a_length_beyond_the_crops_goes_on_in_the_global_view(pools):
    [plain] = pools(1).run(ranks.fit, 1, None, -200, 1)
    for found in pools(2).run(ranks.fit, 2, RING, -200, 1):
        assert found["whole"]
        assert_same(found, plain)


def test_a_step_that_reads_a_weight_of_the_module_itself_is_looked_at(pools):
    """FSDP gathers such a weight before `training_step`, by no hook of a module."""
    [plain] = pools(1).run(functools.partial(ranks.fit, own_weight=True), 1, None, 200, 1)
    for found in pools(2).run(functools.partial(ranks.fit, own_weight=True), 2, RING, 200, 1):
        assert found["whole"]
        assert_same(found, plain)


@pytest.mark.parametrize(
    ("lengths", "more"),
    [
        ((128, 160, 128, 128, 256, 144), {}),
        ((128, 160, 128, 256, 128, 144), {"accumulate_grad_batches": 2}),
        pytest.param(
            (128, 160, 128, 128, 128, 256), {"accumulate_grad_batches": 2, "max_epochs": 2}, marks=pytest.mark.slow
        ),
    ],
    ids=["steps", "micro-batches", "the last of an epoch"],
)
def test_a_later_batch_that_is_longer_is_looked_at_before_its_step(pools, lengths, more):
    """In a window of micro-batches a trial would add to their gradients: it is looked at before the next step."""
    [plain] = pools(1).run(functools.partial(ranks.fit, lengths=lengths, **more), 1, None, 200)
    for found in pools(2).run(functools.partial(ranks.fit, lengths=lengths, **more), 2, RING, 200):
        assert found["whole"]
        same = found["losses"] == pytest.approx(plain["losses"], rel=1e-10)
        assert same == (not more)


def test_longer_batches_are_told_four_times_and_then_where_they_are_longer_by_a_quarter():
    batches = BatchesToTry()
    batches.expect(due=True)
    assert batches.known_length == sys.maxsize
    batches.offer("first", training=True, step=0)
    batches.take(0)
    batches.note_length(100, 100)
    told = []
    for step, tokens in enumerate(range(110, 300, 10)):
        if tokens > batches.known_length:
            told.append(tokens)
            batches.expect_changed(step, tokens, "batch")
    assert told == [110, 120, 130, 140, 180, 230, 290]
    batches.note_length(100, None)
    assert batches.known_length > sys.maxsize / 2


@pytest.mark.slow
@pytest.mark.parametrize(("above", "rows"), [(10_000, 1), (200, 2)], ids=["no branch", "tried whole"])
def test_a_step_whose_length_hides_nothing_sees_its_part(pools, above, rows):
    """With two rows one of them is tried whole, so that the branch is compared itself: here it is exact on parts that take it, or refused."""
    [plain] = pools(1).run(ranks.fit, 1, None, above, rows)
    for found in pools(2).run(ranks.fit, 2, RING, above, rows):
        assert found["whole"] == (above == 200)
        assert_same(found, plain)


def test_without_a_global_view_it_is_refused_with_the_line(pools):
    for said in pools(2).run(ranks.fit, 2, dict(RING, global_view=False), 200):
        assert "at 256 tokens training_step calls other functions of torch than at 128, or with other numbers (" in said
        assert "untried_length_ranks.py:" in said
        assert "x = x + torch.tanh(self.far(x))" in said
        assert "of which a rank sees 128 tokens" in said


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.kept = nn.Linear(4, 4), []

    def forward(self, x):
        self.kept.append(x)
        if x.shape[0] > 8:
            x = x.cumsum(0)
        return float(self.linear(x).sum()) + table(x.shape[0]).sum()


@functools.lru_cache
def table(size):
    return torch.ones(size)


def test_runs_by_shapes_name_what_they_call_and_leave_nothing():
    layer = Layer()
    called = calls_by_shapes(layer, [lambda: layer(torch.empty(4, 4)), lambda: layer(torch.empty(16, 4))])
    assert called.failure is None
    short, long = called.runs
    assert {each.name for each in long.keys() - short.keys()} == {"cumsum"}
    assert not short.keys() - long.keys()
    assert all(each.file == __file__ for each in long)
    assert not layer.kept
    assert not table.cache_info().currsize
    assert type(layer.linear.weight) is nn.Parameter


def test_a_run_that_fails_communicates_or_waits_is_said_to_be_unknown():
    layer, x = Layer(), torch.zeros(3)

    def failing():
        raise ValueError("of mine\nmore")

    assert calls_by_shapes(layer, [failing]).failure == "ValueError: of mine"
    assert "nonzero" in calls_by_shapes(layer, [lambda: x.nonzero()]).failure
    assert calls_by_shapes(layer, [lambda: time.sleep(60)], limit_s=0.5).failure == "it did not end within 0 s"
    assert calls_by_shapes(layer, [lambda: os._exit(3)]).failure is not None
    assert not dist.is_initialized()
    communicating = calls_by_shapes(layer, [lambda: torch.ops._c10d_functional.all_reduce(x, "sum", "0")])
    assert communicating.failure == "RuntimeError: it calls _c10d_functional.all_reduce.default"
