"""Ranks that hold the same shard and come apart are found, by name, and before a checkpoint keeps one of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_sp.step.agreement.replicas import difference, hash_of_bits
from tests.step import watch_ranks as ranks


@pytest.mark.parametrize("save", [False, True], ids=["while training", "before a checkpoint"])
def test_replicas_that_come_apart_are_named(pools, save):
    first, *others = pools(4).run(_drift, 3, dict(ulysses_size=2, ring_size=2, shard_size=2), save)
    assert [each["said"] for each in others] == [[]] * 3
    (said,) = first["said"]
    assert f"after {4 if save else 2} optimizer steps 1 of " in said
    assert "(shard_size=2 of 4 ranks): model.layers.0.attention_norm.weight;" in said
    assert "ranks [1] and [3] hold other numbers" in said


@pytest.mark.parametrize("shard_size", [1, 2])
def test_replicas_of_a_right_fit_are_the_same_to_the_bit(pools, shard_size):
    for answer in pools(2).run(_drift, None, dict(ring_size=2, shard_size=shard_size), True):
        assert answer == {"said": []}


def test_a_right_fit_of_two_shards_on_four_ranks_is_compared_and_ends(pools):
    for answer in pools(4).run(_drift, None, dict(ulysses_size=2, ring_size=2, shard_size=2), True):
        assert answer == {"said": []}


def test_whole_copies_that_come_apart_are_named(pools):
    first, *_ = pools(2).run(_drift, 1, dict(ring_size=2, shard_size=1), True)
    (said,) = first["said"]
    assert "(shard_size=1 of 2 ranks): model.layers.0.attention_norm.weight;" in said


def test_shards_that_one_rank_alone_holds_have_no_replica(pools):
    for answer in pools(2).run(_drift, 1, dict(ring_size=2), True):
        assert answer["said"] == []


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64])
def test_a_change_of_bits_or_places_changes_the_hash(dtype, monkeypatch):
    monkeypatch.setattr("lightning_sp.step.agreement.replicas._CHUNK", 10)
    tensor = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)).to(dtype)

    def changed(change):
        other = tensor.clone()
        change(other)
        return hash_of_bits(other) != hash_of_bits(tensor)

    def bits_up_and_down(other):
        flat = (torch.view_as_real(other) if dtype.is_complex else other).flatten()
        size = flat.element_size()
        bits = flat.view({8: torch.int64, 4: torch.int32, 2: torch.int16}[size])
        bits[3] += 1
        bits[5] -= 1

    assert hash_of_bits(tensor.clone()) == hash_of_bits(tensor)
    assert changed(bits_up_and_down)
    assert changed(lambda other: other[0].neg_())  # an even number of signs
    assert changed(lambda other: other[:2].neg_())
    assert changed(lambda other: other.copy_(other.flip(0)))  # rows in another order
    assert changed(lambda other: other.copy_(other.roll(1, 1)))


def test_without_parameters_there_is_nothing_to_compare(pools):
    pools(2).run(_of_nothing)


def _drift(rank, strategy, save):
    return ranks.drift(rank, strategy, save=save)


def _of_nothing():
    assert difference(nn.Module(), 0, 1, None) is None
