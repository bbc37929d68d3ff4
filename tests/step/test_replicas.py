"""Ranks that hold the same shard and come apart are found, by name, and before a checkpoint keeps one of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_sp.step.replicas import _sums_of_bits, check_replicas
from tests.step import watch_ranks as ranks


@pytest.mark.parametrize("save", [False, True], ids=["while training", "before a checkpoint"])
def test_replicas_that_come_apart_are_named(pools, save):
    for answer in pools(4).run(_drift, 3, dict(ulysses_size=2, ring_size=2, shard_size=2), save):
        assert "1 of " in answer["error"]
        assert "(shard_size=2 of 4 ranks): model.layers.0.attention_norm.weight;" in answer["error"]
        assert "ranks [1] and [3] hold other numbers" in answer["error"]
        assert answer["steps"] == (4 if save else 2)


@pytest.mark.parametrize("shard_size", [1, 2])
def test_replicas_of_a_right_fit_are_the_same_to_the_bit(pools, shard_size):
    for answer in pools(2).run(_drift, None, dict(ring_size=2, shard_size=shard_size), True):
        assert answer == {"error": "", "steps": 4}


def test_shards_that_one_rank_alone_holds_have_no_replica(pools):
    for answer in pools(2).run(_drift, 1, dict(ring_size=2), True):
        assert answer["error"] == ""


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64])
def test_a_bit_changes_the_sums(dtype):
    tensor = torch.randn(64, generator=torch.Generator().manual_seed(0)).to(dtype)
    other = tensor.clone()
    # One number's last bit up, another's down: the plain sum stays.
    bits = (
        (torch.view_as_real(other) if dtype.is_complex else other)
        .flatten()
        .view({8: torch.int64, 4: torch.int32, 2: torch.int16}[torch.empty(0, dtype=dtype).real.element_size()])
    )
    bits[3] += 1
    bits[5] -= 1
    before, after = _sums_of_bits(tensor), _sums_of_bits(other)
    assert before[0] == after[0]
    assert before[1] != after[1]


def test_without_parameters_there_is_nothing_to_compare(pools):
    pools(2).run(_of_nothing)


def _drift(rank, strategy, save):
    return ranks.drift(rank, strategy, save=save)


def _of_nothing():
    check_replicas(nn.Module(), 0, 1, None)
